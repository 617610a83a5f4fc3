"""After the PyTorch versions of maziarraissi/PINNs: heat equation, Adam first, then L-BFGS with strong Wolfe."""

import time
from collections import OrderedDict

import numpy as np
import torch

from zoo.public import Result

KAPPA = 0.1


def exact(x, t):
    return np.exp(-KAPPA * np.pi**2 * t) * np.sin(np.pi * x)


class DNN(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.depth = len(layers) - 1
        layer_list = []
        for i in range(self.depth - 1):
            layer_list.append((f"layer_{i}", torch.nn.Linear(layers[i], layers[i + 1])))
            layer_list.append((f"activation_{i}", torch.nn.Tanh()))
        layer_list.append((f"layer_{self.depth - 1}", torch.nn.Linear(layers[-2], layers[-1])))
        self.layers = torch.nn.Sequential(OrderedDict(layer_list))

    def forward(self, x):
        return self.layers(x)


class PhysicsInformedNN:
    def __init__(self, X_u, u, X_f, layers, watch):
        self.x_u = torch.tensor(X_u[:, 0:1], requires_grad=True).float()
        self.t_u = torch.tensor(X_u[:, 1:2], requires_grad=True).float()
        self.x_f = torch.tensor(X_f[:, 0:1], requires_grad=True).float()
        self.t_f = torch.tensor(X_f[:, 1:2], requires_grad=True).float()
        self.u = torch.tensor(u).float()
        self.watch = watch
        self.dnn = DNN(layers)
        self.optimizer = torch.optim.LBFGS(
            self.dnn.parameters(),
            lr=1.0,
            max_iter=150,
            max_eval=180,
            history_size=50,
            tolerance_grad=1e-7,
            tolerance_change=1.0 * np.finfo(float).eps,
            line_search_fn="strong_wolfe",
        )
        self.optimizer_Adam = torch.optim.Adam(self.dnn.parameters(), lr=1e-3)
        self.iter = 0
        self.history = []

    def net_u(self, x, t):
        return self.dnn(torch.cat([x, t], dim=1))

    def net_f(self, x, t):
        """The residual of the equation, by automatic differentiation."""
        u = self.net_u(x, t)
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        return u_t - KAPPA * u_xx

    def losses(self):
        u_pred = self.net_u(self.x_u, self.t_u)
        f_pred = self.net_f(self.x_f, self.t_f)
        return torch.mean((self.u - u_pred) ** 2), torch.mean(f_pred**2)

    def loss_func(self):
        self.optimizer.zero_grad()
        loss_u, loss_f = self.losses()
        loss = loss_u + loss_f
        loss.backward()
        self.iter += 1
        self.history.append(loss.item())
        if self.iter % 50 == 0:
            print(
                f"Iter {self.iter}, Loss: {loss.item():.5e}, Loss_u: {loss_u.item():.5e}, Loss_f: {loss_f.item():.5e}"
            )
        return loss

    def train(self, nIter):
        self.dnn.train()
        with self.watch(self.dnn, self.optimizer_Adam):
            for epoch in range(nIter):
                loss_u, loss_f = self.losses()
                loss = loss_u + loss_f
                self.optimizer_Adam.zero_grad()
                loss.backward()
                self.optimizer_Adam.step()
                self.history.append(loss.item())
                if epoch % 100 == 0:
                    print(f"It: {epoch}, Loss: {loss.item():.3e}")
        with self.watch(self.dnn, self.optimizer):
            self.optimizer.step(self.loss_func)

    def predict(self, X):
        x = torch.tensor(X[:, 0:1], requires_grad=True).float()
        t = torch.tensor(X[:, 1:2], requires_grad=True).float()
        self.dnn.eval()
        return self.net_u(x, t).detach().cpu().numpy(), self.net_f(x, t).detach().cpu().numpy()


def main(watch, seed, folder):
    np.random.seed(1234 + seed)
    torch.manual_seed(1234 + seed)
    N_u, N_f = 60, 300
    layers = [2, 20, 20, 20, 1]
    x_start, t_edge = np.random.rand(N_u // 2, 1), np.random.rand(N_u // 2, 1)
    edges = np.hstack([np.random.randint(0, 2, (N_u // 2, 1)).astype(float), t_edge])
    X_u_train = np.vstack([np.hstack([x_start, np.zeros_like(x_start)]), edges])
    u_train = exact(X_u_train[:, 0:1], X_u_train[:, 1:2])
    X_f_train = np.vstack([np.random.rand(N_f, 2), X_u_train])

    model = PhysicsInformedNN(X_u_train, u_train, X_f_train, layers, watch)
    start_time = time.time()
    model.train(500)
    print(f"Training time: {time.time() - start_time:.4f}s")

    x, t = np.meshgrid(np.linspace(0, 1, 41), np.linspace(0, 1, 21))
    X_star = np.hstack([x.flatten()[:, None], t.flatten()[:, None]])
    u_star = exact(X_star[:, 0:1], X_star[:, 1:2])
    u_pred, _ = model.predict(X_star)
    error_u = np.linalg.norm(u_star - u_pred, 2) / np.linalg.norm(u_star, 2)
    print(f"Error u: {error_u:e}")
    np.save(folder / "u_pred.npy", u_pred)
    torch.save(model.dnn.state_dict(), folder / "dnn.pt")
    objects = {"dnn": model.dnn, "adam": model.optimizer_Adam, "lbfgs": model.optimizer}
    return Result("relative error", float(error_u), 0.05, model.history, objects, higher_is_better=False)
