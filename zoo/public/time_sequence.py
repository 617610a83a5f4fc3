"""After pytorch/examples, ``time_sequence_prediction``: LSTM cells in double precision under L-BFGS with a closure."""

import argparse

import numpy as np
import torch
from torch import nn, optim

from zoo.public import Result


class Sequence(nn.Module):
    """Two cells on top of each other; goes on with what it predicted for ``future`` steps."""

    def __init__(self, hidden=20):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)])
        self.linear = nn.Linear(hidden, 1)

    def forward(self, series, future=0):
        zero = series.new_zeros(len(series), self.linear.in_features)
        states = [(zero, zero) for _ in self.cells]
        predicted = []
        for step in range(series.shape[1] + future):
            value = series[:, step : step + 1] if step < series.shape[1] else predicted[-1]
            for i, cell in enumerate(self.cells):
                states[i] = cell(value, states[i])
                value = states[i][0]
            predicted.append(self.linear(value))
        return torch.cat(predicted, dim=1)


def sine_waves(count=24, length=60, period=10):
    starts = np.random.randint(-4 * period, 4 * period, (count, 1))
    return np.sin((np.arange(length) + starts) / period)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="steps to run")
    parser.add_argument("--future", type=int, default=60, help="steps to predict beyond the data")
    opt = parser.parse_args([])
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.save(sine_waves(), folder / "traindata.pt")

    waves = torch.from_numpy(torch.load(folder / "traindata.pt", weights_only=False))
    (test_x, test_y), (x, y) = ((part[:, :-1], part[:, 1:]) for part in (waves[:3], waves[3:]))
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=14)  # all of the data is one batch
    history = []

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(x), y)
        print("loss:", loss.item())
        loss.backward()
        history.append(loss.item())
        return loss

    with watch(seq, optimizer):
        for i in range(opt.steps):
            print("STEP: ", i)
            optimizer.step(closure)
            with torch.no_grad():
                pred = seq(test_x, future=opt.future)
                test_loss = criterion(pred[:, : test_y.shape[1]], test_y).item()
            print("test loss:", test_loss)
            np.savetxt(folder / f"predict{i}.csv", pred.numpy(), delimiter=",")
    objects = {"seq": seq, "optimizer": optimizer}
    return Result("test loss", test_loss, 0.05, history, objects, higher_is_better=False)
