"""After facebookresearch/dlrm: embedding bags with offsets, dot interaction, accuracy by np.round, best model saved."""

import sys
import time
from argparse import Namespace

import numpy as np
import torch
import torch.nn as nn
from torch.nn.parameter import Parameter
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result


class SyntheticClicks(Dataset):
    """Four dense features, three lists of category ids, and a click (0 or 1)."""

    def __init__(self, n, ln_emb, seed):
        truth = np.random.RandomState(123)
        effect = [truth.normal(size=size) for size in ln_emb]
        weight = truth.normal(size=4)
        rng = np.random.RandomState(seed)
        self.X = rng.rand(n, 4).astype(np.float32)
        self.lS_i = [[rng.randint(size, size=rng.randint(1, 4)) for size in ln_emb] for _ in range(n)]
        self.T = np.zeros((n, 1), dtype=np.float32)
        for i, bags in enumerate(self.lS_i):
            a, b, c = (effect[k][ids].sum() for k, ids in enumerate(bags))
            logit = 1.2 * a + 0.6 * b + 0.5 * b * c + 2 * (self.X[i] - 0.5) @ weight
            self.T[i] = float(rng.rand() < 1 / (1 + np.exp(-2 * logit)))

    def __len__(self):
        return len(self.T)

    def __getitem__(self, index):
        return self.X[index], self.lS_i[index], self.T[index]


def collate_wrapper(list_of_tuples):
    X, lS, T = zip(*list_of_tuples)
    lS_o, lS_i = [], []
    for k in range(len(lS[0])):
        sizes = [len(bags[k]) for bags in lS]
        lS_o.append(torch.tensor(np.cumsum([0, *sizes[:-1]])))
        lS_i.append(torch.tensor(np.concatenate([bags[k] for bags in lS])))
    return torch.log(torch.tensor(np.array(X)) + 1), torch.stack(lS_o), lS_i, torch.tensor(np.array(T))


class DLRM_Net(nn.Module):
    def create_mlp(self, ln, sigmoid_layer):
        layers = nn.ModuleList()
        for i in range(0, ln.size - 1):
            n, m = int(ln[i]), int(ln[i + 1])
            LL = nn.Linear(n, m, bias=True)
            W = np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n)).astype(np.float32)
            bt = np.random.normal(0.0, np.sqrt(1 / m), size=m).astype(np.float32)
            LL.weight.data = torch.tensor(W, requires_grad=True)
            LL.bias.data = torch.tensor(bt, requires_grad=True)
            layers.append(LL)
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return torch.nn.Sequential(*layers)

    def create_emb(self, m, ln):
        emb_l = nn.ModuleList()
        for n in ln:
            EE = nn.EmbeddingBag(int(n), m, mode="sum", sparse=True)
            W = np.random.uniform(low=-np.sqrt(1 / n), high=np.sqrt(1 / n), size=(n, m)).astype(np.float32)
            EE.weight.data = torch.tensor(W, requires_grad=True)
            emb_l.append(EE)
        return emb_l

    def __init__(self, m_spa, ln_emb, ln_bot, ln_top, sigmoid_top):
        super().__init__()
        self.emb_l = self.create_emb(m_spa, ln_emb)
        self.bot_l = self.create_mlp(ln_bot, -1)
        self.top_l = self.create_mlp(ln_top, sigmoid_top)
        self.loss_fn = torch.nn.BCELoss(reduction="mean")

    def apply_emb(self, lS_o, lS_i, emb_l):
        return [emb_l[k](sparse_index_group_batch, lS_o[k]) for k, sparse_index_group_batch in enumerate(lS_i)]

    def interact_features(self, x, ly):
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_o, lS_i, self.emb_l)
        z = self.interact_features(x, ly)
        return torch.clamp(self.top_l(z), min=1e-6, max=1 - 1e-6)


def main(watch, seed, folder):
    args = Namespace(
        arch_sparse_feature_size=8, arch_embedding_size=[40, 30, 20], arch_mlp_bot="4-16-8", arch_mlp_top="32-16-1",
        mini_batch_size=64, nepochs=9, learning_rate=0.4, print_freq=20, test_freq=40, numpy_rand_seed=123 + seed,
        save_model=str(folder / "dlrm.pt"),
    )  # fmt: skip
    np.random.seed(args.numpy_rand_seed)
    np.set_printoptions(precision=5)
    torch.set_printoptions(precision=5)
    torch.manual_seed(args.numpy_rand_seed)

    ln_emb = np.array(args.arch_embedding_size)
    train_data, test_data = SyntheticClicks(6000, ln_emb, 1), SyntheticClicks(800, ln_emb, 2)
    batch = {"batch_size": args.mini_batch_size, "collate_fn": collate_wrapper, "num_workers": 0}
    train_ld, test_ld = DataLoader(train_data, shuffle=True, **batch), DataLoader(test_data, shuffle=False, **batch)
    nbatches = len(train_ld)

    m_spa = args.arch_sparse_feature_size
    ln_bot = np.fromstring(args.arch_mlp_bot, dtype=int, sep="-")
    num_fea = ln_emb.size + 1
    num_int = num_fea * (num_fea - 1) // 2 + m_spa
    ln_top = np.fromstring(str(num_int) + "-" + args.arch_mlp_top, dtype=int, sep="-")
    print("# of features (sparse and dense)")
    print(num_fea)
    dlrm = DLRM_Net(m_spa, ln_emb, ln_bot, ln_top, sigmoid_top=ln_top.size - 2)
    print("initial parameters (weights and bias):")
    for param in dlrm.parameters():
        print(param.detach().cpu().numpy().ravel()[:3])
    assert isinstance(dlrm.bot_l[0].weight, Parameter)
    optimizer = torch.optim.SGD(dlrm.parameters(), lr=args.learning_rate)
    history = []

    best_gA_test = 0
    total_time = total_loss = total_accu = total_iter = total_samp = k = 0
    print("time/loss/accuracy (if enabled):")
    with watch(dlrm, optimizer, loader=train_ld):
        while k < args.nepochs:
            for j, (X, lS_o, lS_i, T) in enumerate(train_ld):
                t1 = time.time()
                Z = dlrm(X, lS_o, lS_i)
                E = dlrm.loss_fn(Z, T)
                L = E.detach().cpu().numpy()
                S = Z.detach().cpu().numpy()
                T = T.detach().cpu().numpy()
                mbs = T.shape[0]
                A = np.sum((np.round(S, 0) == T).astype(np.uint8))

                optimizer.zero_grad()
                E.backward()
                optimizer.step()

                total_time += time.time() - t1
                total_accu += A
                total_loss += L * mbs
                total_iter += 1
                total_samp += mbs
                history.append(float(L))

                should_print = ((j + 1) % args.print_freq == 0) or (j + 1 == nbatches)
                should_test = (args.test_freq > 0) and (((j + 1) % args.test_freq == 0) or (j + 1 == nbatches))
                if should_print or should_test:
                    gT = 1000.0 * total_time / total_iter
                    gA = total_accu / total_samp
                    gL = total_loss / total_samp
                    total_time = total_accu = total_loss = total_iter = total_samp = 0
                    print(
                        f"Finished training it {j + 1}/{nbatches} of epoch {k}, {gT:.2f} ms/it, "
                        f"loss {gL:.6f}, accuracy {gA * 100:3.3f} %"
                    )
                    sys.stdout.flush()

                if should_test:
                    test_accu = test_loss = test_samp = 0
                    for X_test, lS_o_test, lS_i_test, T_test in test_ld:
                        Z_test = dlrm(X_test, lS_o_test, lS_i_test)
                        E_test = dlrm.loss_fn(Z_test, T_test)
                        L_test = E_test.detach().cpu().numpy()
                        S_test = Z_test.detach().cpu().numpy()
                        T_test = T_test.detach().cpu().numpy()
                        mbs_test = T_test.shape[0]
                        test_accu += np.sum((np.round(S_test, 0) == T_test).astype(np.uint8))
                        test_loss += L_test * mbs_test
                        test_samp += mbs_test
                    gA_test = test_accu / test_samp
                    gL_test = test_loss / test_samp
                    if gA_test > best_gA_test:
                        best_gA_test = gA_test
                        print(f"Saving model to {args.save_model}")
                        torch.save(
                            {
                                "epoch": k,
                                "nepochs": args.nepochs,
                                "nbatches": nbatches,
                                "iter": j + 1,
                                "state_dict": dlrm.state_dict(),
                                "train_acc": float(gA),
                                "train_loss": float(gL),
                                "test_acc": float(gA_test),
                                "test_loss": float(gL_test),
                                "opt_state_dict": optimizer.state_dict(),
                            },
                            args.save_model,
                        )
                    print(
                        f"Testing at - {j + 1}/{nbatches} of epoch {k}, "
                        f"loss {gL_test:.6f}, accuracy {gA_test * 100:3.3f} %, best {best_gA_test * 100:3.3f} %"
                    )
            k += 1
    return Result("test accuracy", float(best_gA_test), 0.7, history, {"dlrm": dlrm, "optimizer": optimizer})
