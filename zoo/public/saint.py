"""After somepago/saint: attention over the columns, then over the rows of the batch; AUROC on validation and test."""

from argparse import Namespace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result


def data_prep(n=4000):
    """Three categorical and four continuous columns; the label depends on products of them."""
    rng = np.random.RandomState(0)
    cat_dims = [5, 4, 3]
    X_cat = np.stack([rng.randint(d, size=n) for d in cat_dims], axis=1)
    X_con = rng.normal(size=(n, 4)).astype(np.float32)
    effects = [rng.normal(size=d) for d in cat_dims]
    logit = 1.5 * X_con[:, 0] * effects[0][X_cat[:, 0]] + effects[1][X_cat[:, 1]] + 1.2 * X_con[:, 1]
    logit += 0.8 * X_con[:, 2] * X_con[:, 3] + effects[2][X_cat[:, 2]]
    y = (rng.rand(n) < 1 / (1 + np.exp(-2 * logit))).astype(np.int64)
    parts = np.split(np.arange(n), [int(0.65 * n), int(0.8 * n)])
    scale = X_con[parts[0]].mean(0), X_con[parts[0]].std(0)
    return cat_dims, [CatCon(X_cat[part], X_con[part], y[part], *scale) for part in parts]


class CatCon(Dataset):
    """Category ids after the id 0 of CLS, standardized numbers, the label."""

    def __init__(self, categories, numbers, labels, mean, std):
        self.categories = np.concatenate([np.zeros((len(labels), 1)), categories], axis=1).astype(np.int64)
        self.numbers, self.labels = ((numbers - mean) / std).astype(np.float32), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.categories[row], self.numbers[row], self.labels[row]


class PreNorm(nn.Module):
    """The way around is from the normalized input, as the authors have it."""

    def __init__(self, dim, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), inner

    def forward(self, x):
        x = self.norm(x)
        return x + self.inner(x)


class GEGLU(nn.Module):
    def forward(self, x):
        value, gate = x.tensor_split(2, dim=-1)
        return value * F.gelu(gate)


def feed_forward(dim, mult, dropout):
    return nn.Sequential(nn.Linear(dim, 2 * mult * dim), GEGLU(), nn.Dropout(dropout), nn.Linear(mult * dim, dim))


class Attention(nn.Module):
    def __init__(self, dim, heads, dim_head=8):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / q.size(-1) ** 0.5, dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).flatten(2))


class RowColTransformer(nn.Module):
    def __init__(self, dim, columns, depth, heads, dropout):
        super().__init__()
        wide = dim * columns
        self.layers = nn.ModuleList()
        for _ in range(depth):
            over_columns = nn.Sequential(
                PreNorm(dim, Attention(dim, heads)), PreNorm(dim, feed_forward(dim, 2, dropout))
            )
            over_rows = nn.Sequential(
                PreNorm(wide, Attention(wide, heads)), PreNorm(wide, feed_forward(wide, 1, dropout))
            )
            self.layers.append(nn.ModuleList([over_columns, over_rows]))

    def forward(self, x):
        shape = x.shape
        for over_columns, over_rows in self.layers:
            x = over_columns(x)
            x = over_rows(x.flatten(1)[None])[0].view(shape)  # the batch is the sequence
        return x


def simple_MLP(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class SAINT(nn.Module):
    """Never called as a whole: the loop goes through its parts."""

    def __init__(self, categories, num_continuous, opt):
        super().__init__()
        starts = np.cumsum([0, *categories[:-1]])
        self.register_buffer("categories_offset", torch.from_numpy(starts))
        self.embeds = nn.Embedding(sum(categories), opt.embedding_size)
        self.numbers = nn.ModuleList(simple_MLP(1, 24, opt.embedding_size) for _ in range(num_continuous))
        columns = len(categories) + num_continuous
        self.transformer = RowColTransformer(
            opt.embedding_size, columns, opt.transformer_depth, opt.attention_heads, opt.ff_dropout
        )
        self.mlpfory = simple_MLP(opt.embedding_size, 48, 2)


def embed_data(x_categ, x_cont, model):
    tokens = model.embeds(x_categ + model.categories_offset)
    numbers = [mlp(x_cont[:, [i]]) for i, mlp in enumerate(model.numbers)]
    return torch.cat([tokens, torch.stack(numbers, dim=1)], dim=1)


def classification_scores(model, dloader):
    model.eval()
    labels, outputs = [], []
    with torch.no_grad():
        for x_categ, x_cont, y in dloader:
            reps = model.transformer(embed_data(x_categ, x_cont, model))
            outputs.append(model.mlpfory(reps[:, 0]))
            labels.append(y)
    labels, outputs = torch.cat(labels), torch.cat(outputs)
    accuracy = 100 * (outputs.argmax(1) == labels).float().mean().item()
    return accuracy, roc_auc_score(labels.numpy(), outputs.softmax(1)[:, 1].numpy())


def main(watch, seed, folder):
    opt = Namespace(
        embedding_size=8, transformer_depth=1, attention_heads=4, ff_dropout=0.5, lr=0.003, epochs=7, batchsize=64,
        set_seed=1 + seed,
    )  # fmt: skip
    torch.manual_seed(opt.set_seed)
    print("Processing the dataset, it might take some time.")
    cat_dims, datasets = data_prep()
    trainloader, validloader, testloader = (
        DataLoader(dataset, batch_size=opt.batchsize, shuffle=i == 0) for i, dataset in enumerate(datasets)
    )
    model = SAINT((1, *cat_dims), 4, opt)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters(), lr=opt.lr)
    history, best_valid_auroc, best_test_auroc = [], 0.0, 0.0
    print("Training begins now.")
    with watch(model, optimizer, loader=trainloader):
        for epoch in range(opt.epochs):
            model.train()
            running_loss = 0.0
            for x_categ, x_cont, y_gts in trainloader:
                optimizer.zero_grad()
                reps = model.transformer(embed_data(x_categ, x_cont, model))
                # the representation of CLS alone predicts the label
                loss = criterion(model.mlpfory(reps[:, 0]), y_gts)
                loss.backward()
                optimizer.step()
                running_loss += loss.item()
                history.append(loss.item())
            if epoch % 2 == 0:
                accuracy, auroc = classification_scores(model, validloader)
                test_accuracy, test_auroc = classification_scores(model, testloader)
                print(f"[EPOCH {epoch + 1}] VALID ACCURACY: {accuracy:.3f}, VALID AUROC: {auroc:.3f}")
                print(f"[EPOCH {epoch + 1}] TEST ACCURACY: {test_accuracy:.3f}, TEST AUROC: {test_auroc:.3f}")
                if auroc > best_valid_auroc:
                    best_valid_auroc, best_test_auroc = auroc, test_auroc
                    torch.save(model.state_dict(), folder / "bestmodel.pth")
    print(f"TOTAL NUMBER OF PARAMS: {sum(p.numel() for p in model.parameters() if p.requires_grad)}")
    print(f"AUROC on best model:  {best_test_auroc:.3f}")
    objects = {"model": model, "optimizer": optimizer}
    return Result("test AUROC", float(best_test_auroc), 0.8, history, objects)
