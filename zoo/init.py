"""Zoo, group I: faults of the initialisation, in plain PyTorch loops."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.host import TinyGPT, Watch, fault, host, loader, mlp, sequences, table
from zoo.model import predict_next, train


@fault("I01", "model.init_symmetric", delay="S")
def constant_weights(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.01)
            nn.init.zeros_(layer.bias)
    train(watch, model, loader(*table(seed), seed))


def unit_normal(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, 0.0, 1.0)


@fault("I02", "model.init_too_large", delay="S")
def weights_of_std_one(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = TinyGPT()
    model.apply(unit_normal)
    ids = sequences(seed)
    train(watch, model, loader(ids, ids, seed, batch=32), predict_next, epochs=2)


def fresh(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


@fault("I03", "checkpoint.loaded_weights_overwritten", delay="S", fixable=False)
def initialised_after_loading(watch: Watch, seed: int) -> None:
    """A fine-tune whose pretrained weights are overwritten by an initialisation after loading."""
    model, optimizer, data = host(seed, torch.optim.Adam, lr=1e-3)
    trained = pretrained(seed)
    with watch(model, optimizer, loader=data):
        model.load_state_dict(trained)
        model.apply(fresh)
        for _ in range(3):
            for _, x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


def pretrained(seed: int) -> dict[str, torch.Tensor]:
    """Weights trained on the same task, without ``watch``."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _, x, y in [batch for batch in loader(*table(seed), seed) for _ in range(5)]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()
