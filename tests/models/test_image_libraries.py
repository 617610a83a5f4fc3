"""Models of timm and torchvision by name. Neither can be imported beside every release of torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import MissingExtra, UsageError
from trainwright.models.image_libraries import timm_model, torchvision_model


@pytest.mark.slow
@pytest.mark.parametrize(("make", "package"), [(timm_model, "timm"), (torchvision_model, "torchvision")])
def test_a_model_of_the_library(make: Any, package: str) -> None:
    pytest.importorskip(package)
    model = make(architecture="resnet18", classes=7)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    with pytest.raises(UsageError, match=f"{package} has no model 'resnet19'"):
        make(architecture="resnet19", classes=7)


def made(name: str, **options: object) -> nn.Module:
    if "in_chanz" in options:
        raise TypeError("unexpected keyword argument 'in_chanz'")
    model: Any = nn.Identity()
    model.options = (name, options)
    return model


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_classes_and_options_are_passed_and_wrong_ones_refused(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: what it checks is the calls, not the library."""
    module = SimpleNamespace(list_models=lambda: ["resnet18", "vit_b_16"], create_model=made, get_model=made)
    monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setitem(sys.modules, "torchvision.models", module)
    make: Any = timm_model if library == "timm" else torchvision_model
    untrained = {"pretrained": False} if library == "timm" else {"weights": None}
    model = make(architecture="resnet18", classes=7, in_chans=1)
    assert model.options == ("resnet18", {"num_classes": 7, "in_chans": 1, **untrained})
    with pytest.raises(UsageError, match="has no model 'resnet81'") as caught:
        make(architecture="resnet81", classes=7)
    assert caught.value.remedy == "did you mean 'resnet18'?"
    with pytest.raises(UsageError, match="has no model 'x'") as caught:
        make(architecture="x", classes=7)
    assert "list_models()" in caught.value.remedy
    with pytest.raises(UsageError, match=r"does not take these arguments: .*in_chanz"):
        make(architecture="resnet18", classes=7, in_chanz=1)


@pytest.mark.parametrize(("make", "package"), [(timm_model, "timm"), (torchvision_model, "torchvision")])
def test_without_the_library_it_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(package):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.models", None)
    with pytest.raises(MissingExtra, match=f"'{package}', which is not installed") as caught:
        make(architecture="resnet18", classes=7)
    assert "pip install" in caught.value.remedy
