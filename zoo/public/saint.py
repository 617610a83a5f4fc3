"""After somepago/saint: attention over the columns, then over the rows of the batch; AUROC on validation and test."""

import os
from argparse import Namespace

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim
from sklearn.metrics import roc_auc_score
from torch import einsum, nn
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result


def data_prep(seed=0, n=4000):
    """Three categorical and four continuous columns; the label depends on products of them."""
    rng = np.random.RandomState(seed)
    cat_dims = [5, 4, 3]
    X_cat = np.stack([rng.randint(d, size=n) for d in cat_dims], axis=1)
    X_con = rng.normal(size=(n, 4)).astype(np.float32)
    effects = [rng.normal(size=d) for d in cat_dims]
    logit = 1.5 * X_con[:, 0] * effects[0][X_cat[:, 0]] + effects[1][X_cat[:, 1]] + 1.2 * X_con[:, 1]
    logit += 0.8 * X_con[:, 2] * X_con[:, 3] + effects[2][X_cat[:, 2]]
    y = (rng.rand(n) < 1 / (1 + np.exp(-2 * logit))).astype(np.int64)
    cuts = np.split(np.arange(n), [int(0.65 * n), int(0.8 * n)])
    mean, std = X_con[cuts[0]].mean(0), X_con[cuts[0]].std(0)
    return cat_dims, [(X_cat[cut], X_con[cut], y[cut]) for cut in cuts], (mean, std)


class DataSetCatCon(Dataset):
    def __init__(self, part, continuous_mean_std):
        X_cat, X_con, self.y = part
        mean, std = continuous_mean_std
        self.X1, self.X2 = X_cat.astype(np.int64), ((X_con - mean) / std).astype(np.float32)
        self.cls = np.zeros((len(self.y), 1), dtype=np.int64)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, idx):
        return np.concatenate((self.cls[idx], self.X1[idx])), self.X2[idx], self.y[idx]


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class FeedForward(nn.Module):
    def __init__(self, dim, mult=2, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, dim * mult * 2), GEGLU(), nn.Dropout(dropout), nn.Linear(dim * mult, dim)
        )

    def forward(self, x, **kwargs):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=8):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Linear(inner_dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = (einsum("b h i d, b h j d -> b h i j", q, k) * self.scale).softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class RowColTransformer(nn.Module):
    def __init__(self, dim, nfeats, depth, heads, ff_dropout):
        super().__init__()
        self.layers = nn.ModuleList([])
        wide = dim * nfeats
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        PreNorm(dim, Residual(Attention(dim, heads=heads))),
                        PreNorm(dim, Residual(FeedForward(dim, dropout=ff_dropout))),
                        PreNorm(wide, Residual(Attention(wide, heads=heads))),
                        PreNorm(wide, Residual(FeedForward(wide, mult=1, dropout=ff_dropout))),
                    ]
                )
            )

    def forward(self, x, x_cont):
        x = torch.cat((x, x_cont), dim=1)
        b, n, d = x.shape
        for attn1, ff1, attn2, ff2 in self.layers:
            x = ff1(attn1(x))
            x = x.reshape(1, b, n * d)  # the rows of the batch attend to each other
            x = ff2(attn2(x))
            x = x.reshape(b, n, d)
        return x


class simple_MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dims[0], dims[1]), nn.ReLU(), nn.Linear(dims[1], dims[2]))

    def forward(self, x):
        if len(x.shape) == 1:
            x = x.view(x.size(0), -1)
        return self.layers(x)


class SAINT(nn.Module):
    def __init__(self, categories, num_continuous, dim, depth, heads, ff_dropout, y_dim):
        super().__init__()
        offset = F.pad(torch.tensor(list(categories)), (1, 0), value=0).cumsum(dim=-1)[:-1]
        self.register_buffer("categories_offset", offset)
        self.embeds = nn.Embedding(sum(categories), dim)
        self.simple_MLP = nn.ModuleList([simple_MLP([1, 24, dim]) for _ in range(num_continuous)])
        self.transformer = RowColTransformer(dim, len(categories) + num_continuous, depth, heads, ff_dropout)
        self.mlpfory = simple_MLP([dim, 48, y_dim])


def embed_data_mask(x_categ, x_cont, model):
    x_categ = x_categ + model.categories_offset.type_as(x_categ)
    x_categ_enc = model.embeds(x_categ)
    n1, n2 = x_cont.shape
    x_cont_enc = torch.empty(n1, n2, x_categ_enc.shape[-1])
    for i in range(n2):
        x_cont_enc[:, i, :] = model.simple_MLP[i](x_cont[:, i])
    return x_categ_enc, x_cont_enc


def classification_scores(model, dloader):
    model.eval()
    y_test, y_pred, prob = torch.empty(0), torch.empty(0), torch.empty(0)
    with torch.no_grad():
        for x_categ, x_cont, y_gts in dloader:
            reps = model.transformer(*embed_data_mask(x_categ, x_cont, model))
            y_outs = model.mlpfory(reps[:, 0, :])
            y_test = torch.cat([y_test, y_gts.squeeze().float()], dim=0)
            y_pred = torch.cat([y_pred, torch.argmax(y_outs, dim=1).float()], dim=0)
            prob = torch.cat([prob, torch.softmax(y_outs, dim=1)[:, -1].float()], dim=0)
    acc = (y_pred == y_test).sum().float() / y_test.shape[0] * 100
    return acc.item(), roc_auc_score(y_true=y_test.numpy(), y_score=prob.numpy())


def count_parameters(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def main(watch, seed, folder):
    opt = Namespace(
        embedding_size=8, transformer_depth=1, attention_heads=4, ff_dropout=0.5, lr=0.003, epochs=7, batchsize=64,
        set_seed=1 + seed,
    )  # fmt: skip
    torch.manual_seed(opt.set_seed)
    os.makedirs(folder / "bestmodels", exist_ok=True)
    print("Downloading and processing the dataset, it might take some time.")
    cat_dims, parts, continuous_mean_std = data_prep()
    datasets = [DataSetCatCon(part, continuous_mean_std) for part in parts]
    trainloader = DataLoader(datasets[0], batch_size=opt.batchsize, shuffle=True, num_workers=0)
    validloader = DataLoader(datasets[1], batch_size=opt.batchsize, shuffle=False, num_workers=0)
    testloader = DataLoader(datasets[2], batch_size=opt.batchsize, shuffle=False, num_workers=0)
    model = SAINT(
        categories=(1, *cat_dims),
        num_continuous=4,
        dim=opt.embedding_size,
        depth=opt.transformer_depth,
        heads=opt.attention_heads,
        ff_dropout=opt.ff_dropout,
        y_dim=2,
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters(), lr=opt.lr)
    history = []
    best_valid_auroc = 0
    best_test_auroc = 0
    print("Training begins now.")
    with watch(model, optimizer, loader=trainloader):
        for epoch in range(opt.epochs):
            model.train()
            running_loss = 0.0
            for data in trainloader:
                optimizer.zero_grad()
                x_categ, x_cont, y_gts = data
                x_categ_enc, x_cont_enc = embed_data_mask(x_categ, x_cont, model)
                reps = model.transformer(x_categ_enc, x_cont_enc)
                y_reps = reps[:, 0, :]
                y_outs = model.mlpfory(y_reps)
                loss = criterion(y_outs, y_gts.squeeze())
                loss.backward()
                optimizer.step()
                running_loss += loss.item()
                history.append(loss.item())
            if epoch % 2 == 0:
                model.eval()
                with torch.no_grad():
                    accuracy, auroc = classification_scores(model, validloader)
                    test_accuracy, test_auroc = classification_scores(model, testloader)
                    print(f"[EPOCH {epoch + 1}] VALID ACCURACY: {accuracy:.3f}, VALID AUROC: {auroc:.3f}")
                    print(f"[EPOCH {epoch + 1}] TEST ACCURACY: {test_accuracy:.3f}, TEST AUROC: {test_auroc:.3f}")
                    if auroc > best_valid_auroc:
                        best_valid_auroc = auroc
                        best_test_auroc = test_auroc
                        torch.save(model.state_dict(), folder / "bestmodels" / "bestmodel.pth")
                model.train()
    print(f"TOTAL NUMBER OF PARAMS: {count_parameters(model)}")
    print(f"AUROC on best model:  {best_test_auroc:.3f}")
    objects = {"model": model, "optimizer": optimizer}
    return Result("test AUROC", float(best_test_auroc), 0.8, history, objects)
