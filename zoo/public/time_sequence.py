"""After pytorch/examples, ``time_sequence_prediction``: LSTM cells in double precision under L-BFGS with a closure."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

from zoo.public import Result


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 20)
        self.lstm2 = nn.LSTMCell(20, 20)
        self.linear = nn.Linear(20, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 20, dtype=torch.double)
        c_t = torch.zeros(input.size(0), 20, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), 20, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), 20, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def generate_sine_wave(folder, T=10, L=60, N=24):
    x = np.empty((N, L), "int64")
    x[:] = np.array(range(L)) + np.random.randint(-4 * T, 4 * T, N).reshape(N, 1)
    torch.save(np.sin(x / 1.0 / T).astype("float64"), open(folder / "traindata.pt", "wb"))  # noqa: SIM115


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="steps to run")
    opt = parser.parse_args([])
    np.random.seed(seed)
    torch.manual_seed(seed)
    generate_sine_wave(folder)
    data = torch.load(folder / "traindata.pt", weights_only=False)
    input = torch.from_numpy(data[3:, :-1])
    target = torch.from_numpy(data[3:, 1:])
    test_input = torch.from_numpy(data[:3, :-1])
    test_target = torch.from_numpy(data[:3, 1:])
    seq = Sequence()
    seq.double()
    criterion = nn.MSELoss()
    # L-BFGS, since all of the data fit into one batch
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=14)
    history = []
    with watch(seq, optimizer):
        for i in range(opt.steps):
            print("STEP: ", i)

            def closure():
                optimizer.zero_grad()
                out = seq(input)
                loss = criterion(out, target)
                print("loss:", loss.item())
                history.append(loss.item())
                loss.backward()
                return loss

            optimizer.step(closure)
            with torch.no_grad():
                future = 60
                pred = seq(test_input, future=future)
                loss = criterion(pred[:, :-future], test_target)
                print("test loss:", loss.item())
                y = pred.detach().numpy()
            np.savetxt(folder / f"predict{i}.csv", y, delimiter=",")
    objects = {"seq": seq, "optimizer": optimizer}
    return Result("test loss", loss.item(), 0.05, history, objects, higher_is_better=False)
