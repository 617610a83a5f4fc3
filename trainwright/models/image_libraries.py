"""Image models of ``timm`` and ``torchvision`` by name, with new weights and no download."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainwright.errors import UsageError, import_optional, nearest


def timm_model(*, architecture: str, classes: int, **options: object) -> nn.Module:
    """An image model of the library ``timm`` with new weights: pixels_BCHW -> logits_BK.

    Args:
        architecture: Its name in ``timm.list_models()``, such as ``resnet18``.
        classes: Number of outputs. Taken from the training set where a recipe leaves it out.
        **options: Further arguments of ``timm.create_model``, such as ``in_chans: 1`` or ``img_size: 64``.

    Raises UsageError for an unknown name or option, MissingExtra without timm.
    """
    timm = import_optional("timm", needed_for="this model")
    _require_known("timm", architecture, timm.list_models())
    return _made("timm", architecture, timm.create_model, {"num_classes": classes, "pretrained": False, **options})


def torchvision_model(*, architecture: str, classes: int, **options: object) -> nn.Module:
    """An image model of ``torchvision`` with new weights: pixels_BCHW -> logits_BK.

    Args:
        architecture: Its name in ``torchvision.models.list_models()``, such as ``resnet18``.
        classes: Number of outputs. Taken from the training set where a recipe leaves it out.
        **options: Further arguments of ``torchvision.models.get_model``.

    Raises UsageError for an unknown name or option, MissingExtra without torchvision.
    """
    models = import_optional("torchvision.models", needed_for="this model")
    _require_known("torchvision", architecture, models.list_models())
    return _made("torchvision", architecture, models.get_model, {"num_classes": classes, "weights": None, **options})


def _require_known(library: str, architecture: str, names: list[str]) -> None:
    if architecture not in names:
        near = nearest(architecture, names)
        remedy = f"did you mean {near!r}?" if near else f"see list_models() of {library}"
        raise UsageError(f"{library} has no model {architecture!r}", remedy=remedy)


def _made(library: str, architecture: str, make: Callable[..., nn.Module], options: dict[str, object]) -> nn.Module:
    try:
        return make(architecture, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{architecture} of {library} does not take these arguments: {error}",
            remedy=f"{', '.join(options)} were passed; see the documentation of {library}",
        ) from error
