"""After yaringal/multi-task-learning-example: two regressions, weighted in the loss by learned log variances."""

import math

import numpy as np
import torch
import torch.nn as nn

from zoo.public import Result


def gen_data(N):
    """Two linear targets of one input, with noise of standard deviation 1 and 10."""
    X = np.random.randn(N, 1)
    Y1 = 2.0 * X + 8.0 + 1e0 * np.random.randn(N, 1)
    Y2 = 3.0 * X + 3.0 + 1e1 * np.random.randn(N, 1)
    return X, Y1, Y2


def shuffle_data(X, Y1, Y2):
    s = np.arange(X.shape[0])
    np.random.shuffle(s)
    return X[s], Y1[s], Y2[s]


class MTLModel(torch.nn.Module):
    def __init__(self, n_hidden, n_output):
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(1, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_output))
        self.net2 = nn.Sequential(nn.Linear(1, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_output))

    def forward(self, x):
        return [self.net1(x), self.net2(x)]


def criterion(y_pred, y_true, log_vars):
    loss = 0
    for i in range(len(y_pred)):
        precision = torch.exp(-log_vars[i])
        diff = (y_pred[i] - y_true[i]) ** 2.0
        loss += torch.sum(precision * diff + log_vars[i], -1)
    return torch.mean(loss)


def main(watch, seed, folder):
    np.random.seed(seed)
    torch.manual_seed(seed)
    N, nb_epoch, batch_size, nb_features = 400, 130, 20, 64
    X, Y1, Y2 = gen_data(N)
    X, Y1, Y2 = X.astype("float32"), Y1.astype("float32"), Y2.astype("float32")

    model = MTLModel(nb_features, 1)
    log_var_a = torch.zeros((1,), requires_grad=True)
    log_var_b = torch.zeros((1,), requires_grad=True)
    params = [*model.parameters(), log_var_a, log_var_b]
    optimizer = torch.optim.Adam(params, lr=1e-2)
    loss_list = []

    def to_var(x):
        return torch.from_numpy(x)

    model.train()
    with watch(model, optimizer):
        for epoch in range(nb_epoch):
            X, Y1, Y2 = shuffle_data(X, Y1, Y2)
            losses = []
            for j in range(N // batch_size):
                optimizer.zero_grad()
                inp = to_var(X[(j * batch_size) : ((j + 1) * batch_size)])
                target1 = to_var(Y1[(j * batch_size) : ((j + 1) * batch_size)])
                target2 = to_var(Y2[(j * batch_size) : ((j + 1) * batch_size)])
                out = model(inp)
                loss = criterion(out, [target1, target2], [log_var_a, log_var_b])
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
            loss_list.append(np.mean(losses))
            if epoch % 10 == 0:
                print(f"epoch {epoch}: loss {loss_list[-1]:.4f}")
    std_1 = torch.exp(log_var_a) ** 0.5
    std_2 = torch.exp(log_var_b) ** 0.5
    print([std_1.item(), std_2.item()])
    torch.save({"model": model.state_dict(), "log_vars": [log_var_a, log_var_b]}, folder / "mtl.pt")
    error = abs(math.log(std_1.item())) + abs(math.log(std_2.item() / 10.0))
    objects = {"model": model, "optimizer": optimizer}
    losses = [float(each) for each in loss_list]
    return Result("error of the two log deviations", error, 0.35, losses, objects, higher_is_better=False)
