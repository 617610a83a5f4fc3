"""After dragen1860/MAML-Pytorch: fast weights by ``autograd.grad``, a Learner of a config, finetuning on a copy."""

import argparse
from copy import deepcopy

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

from zoo.public import Result
from zoo.public.data import digits


class Learner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vars = nn.ParameterList()
        for name, param in self.config:
            if name == "conv2d":
                w = nn.Parameter(torch.ones(*param[:4]))
                torch.nn.init.kaiming_normal_(w)
                self.vars.append(w)
                self.vars.append(nn.Parameter(torch.zeros(param[0])))
            elif name == "linear":
                w = nn.Parameter(torch.ones(*param))
                torch.nn.init.kaiming_normal_(w)
                self.vars.append(w)
                self.vars.append(nn.Parameter(torch.zeros(param[0])))
            elif name not in ("relu", "flatten"):
                raise NotImplementedError

    def forward(self, x, vars=None):
        if vars is None:
            vars = self.vars
        idx = 0
        for name, param in self.config:
            if name == "conv2d":
                x = F.conv2d(x, vars[idx], vars[idx + 1], stride=param[4], padding=param[5])
                idx += 2
            elif name == "linear":
                x = F.linear(x, vars[idx], vars[idx + 1])
                idx += 2
            elif name == "flatten":
                x = x.view(x.size(0), -1)
            elif name == "relu":
                x = F.relu(x)
        assert idx == len(vars)
        return x

    def parameters(self):
        return self.vars


class Meta(nn.Module):
    def __init__(self, args, config):
        super().__init__()
        self.update_lr, self.meta_lr = args.update_lr, args.meta_lr
        self.task_num, self.update_step, self.update_step_test = args.task_num, args.update_step, args.update_step_test
        self.net = Learner(config)
        self.meta_optim = optim.Adam(self.net.parameters(), lr=self.meta_lr)
        self.losses = []

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        task_num = x_spt.size(0)
        querysz = x_qry.size(1)
        losses_q = [0 for _ in range(self.update_step + 1)]
        corrects = [0 for _ in range(self.update_step + 1)]

        for i in range(task_num):
            logits = self.net(x_spt[i], vars=None)
            loss = F.cross_entropy(logits, y_spt[i])
            grad = torch.autograd.grad(loss, self.net.parameters(), create_graph=True)
            fast_weights = [p - self.update_lr * g for g, p in zip(grad, self.net.parameters())]

            with torch.no_grad():  # before the first update
                logits_q = self.net(x_qry[i], self.net.parameters())
                losses_q[0] += F.cross_entropy(logits_q, y_qry[i])
                corrects[0] += torch.eq(logits_q.argmax(dim=1), y_qry[i]).sum().item()

            with torch.no_grad():  # after it
                logits_q = self.net(x_qry[i], fast_weights)
                losses_q[1] += F.cross_entropy(logits_q, y_qry[i])
                corrects[1] += torch.eq(logits_q.argmax(dim=1), y_qry[i]).sum().item()

            for k in range(1, self.update_step):
                logits = self.net(x_spt[i], fast_weights)
                loss = F.cross_entropy(logits, y_spt[i])
                grad = torch.autograd.grad(loss, fast_weights, create_graph=True)
                fast_weights = [p - self.update_lr * g for g, p in zip(grad, fast_weights)]
                logits_q = self.net(x_qry[i], fast_weights)
                loss_q = F.cross_entropy(logits_q, y_qry[i])
                losses_q[k + 1] += loss_q
                with torch.no_grad():
                    pred_q = F.softmax(logits_q, dim=1).argmax(dim=1)
                    corrects[k + 1] += torch.eq(pred_q, y_qry[i]).sum().item()

        loss_q = losses_q[-1] / task_num
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        self.losses.append(loss_q.item())
        return np.array(corrects) / (querysz * task_num)

    def finetunning(self, x_spt, y_spt, x_qry, y_qry):
        querysz = x_qry.size(0)
        corrects = [0 for _ in range(self.update_step_test + 1)]
        net = deepcopy(self.net)
        fast_weights = list(net.parameters())
        for k in range(self.update_step_test + 1):
            with torch.no_grad():
                pred_q = F.softmax(net(x_qry, fast_weights), dim=1).argmax(dim=1)
                corrects[k] += torch.eq(pred_q, y_qry).sum().item()
            loss = F.cross_entropy(net(x_spt, fast_weights), y_spt)
            grad = torch.autograd.grad(loss, fast_weights)
            fast_weights = [p - self.update_lr * g for g, p in zip(grad, fast_weights)]
        del net
        return np.array(corrects) / querysz


class DigitNShot:
    """Tasks of ``n_way`` classes, a class is a digit under one of eight turns and mirrors."""

    def __init__(self, split, batchsz, n_way, k_shot, k_query):
        images, labels = digits(split)
        self.classes = []
        for d in range(10):
            of_digit = images[labels == d]
            for turn in range(4):
                turned = np.rot90(of_digit, turn, axes=(1, 2))
                self.classes += [turned, turned[:, :, ::-1]]
        self.batchsz, self.n_way, self.k_shot, self.k_query = batchsz, n_way, k_shot, k_query

    def next(self):
        parts = [[], [], [], []]
        for _ in range(self.batchsz):
            x_spt, y_spt, x_qry, y_qry = [], [], [], []
            for j, cur_class in enumerate(np.random.choice(len(self.classes), self.n_way, False)):
                rows = self.classes[cur_class]
                chosen = np.random.choice(len(rows), self.k_shot + self.k_query, False)
                x_spt.append(rows[chosen[: self.k_shot]])
                x_qry.append(rows[chosen[self.k_shot :]])
                y_spt += [j] * self.k_shot
                y_qry += [j] * self.k_query
            for part, each in zip(
                parts, (np.concatenate(x_spt)[:, None], y_spt, np.concatenate(x_qry)[:, None], y_qry)
            ):
                part.append(np.array(each))
        return [torch.from_numpy(np.stack(part).copy()) for part in parts]


def main(watch, seed, folder):
    argparser = argparse.ArgumentParser()
    argparser.add_argument("--epoch", type=int, help="epoch number", default=160)
    argparser.add_argument("--n_way", type=int, help="n way", default=3)
    argparser.add_argument("--k_spt", type=int, help="k shot for support set", default=2)
    argparser.add_argument("--k_qry", type=int, help="k shot for query set", default=6)
    argparser.add_argument("--task_num", type=int, help="meta batch size, namely task num", default=4)
    argparser.add_argument("--meta_lr", type=float, help="meta-level outer learning rate", default=2e-3)
    argparser.add_argument("--update_lr", type=float, help="task-level inner update learning rate", default=0.3)
    argparser.add_argument("--update_step", type=int, help="task-level inner update steps", default=2)
    argparser.add_argument("--update_step_test", type=int, help="update steps for finetunning", default=5)
    args = argparser.parse_args([])
    torch.manual_seed(222 + seed)
    np.random.seed(222 + seed)
    print(args)

    config = [
        ("conv2d", [16, 1, 3, 3, 2, 1]),
        ("relu", [True]),
        ("conv2d", [16, 16, 3, 3, 2, 1]),
        ("relu", [True]),
        ("flatten", []),
        ("linear", [args.n_way, 64]),
    ]
    maml = Meta(args, config)
    num = sum(np.prod(x.shape) for x in maml.parameters() if x.requires_grad)
    print("Total trainable tensors:", num)
    db_train = DigitNShot("train", args.task_num, args.n_way, args.k_spt, args.k_qry)
    db_test = DigitNShot("test", 20, args.n_way, args.k_spt, args.k_qry)

    with watch(maml, maml.meta_optim):
        for step in range(args.epoch):
            x_spt, y_spt, x_qry, y_qry = db_train.next()
            accs = maml(x_spt, y_spt, x_qry, y_qry)
            if step % 20 == 0:
                print("step:", step, "\ttraining acc:", accs)
            if (step + 1) % 80 == 0:
                accs = []
                for each in zip(*db_test.next()):
                    accs.append(maml.finetunning(*each))
                accs = np.array(accs).mean(axis=0).astype(np.float16)
                print("Test acc:", accs)
                torch.save(maml.state_dict(), folder / f"maml_{step + 1}.pt")
    return Result("test accuracy", float(accs[-1]), 0.6, maml.losses, {"maml": maml, "optimizer": maml.meta_optim})
