"""After guoyang9/NCF: NeuMF with negatives drawn anew each epoch, hit rate and NDCG at 10, the best model pickled."""

import argparse
import time

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result


def load_all(user_num=150, item_num=120):
    """Pairs of users and items that like each other, one of each user left for the test with 99 that do not."""
    rng = np.random.RandomState(0)
    users, items = rng.normal(size=(user_num, 3)), rng.normal(size=(item_num, 3))
    score = users @ items.T + rng.gumbel(size=(user_num, item_num)) * 0.5
    train, test = [], []
    for u, liked in enumerate(np.argsort(-score, axis=1)[:, :13]):
        first, *others = rng.permutation(liked).tolist()
        train += [(u, i) for i in others]
        unliked = rng.permutation(np.setdiff1d(np.arange(item_num), liked))[:99].tolist()
        test += [(u, i) for i in (first, *unliked)]
    return train, test, user_num, item_num


class NCFData(Dataset):
    """Positive pairs, and in training ``num_ng`` random others for each of them."""

    def __init__(self, pairs, num_item, num_ng=0):
        self.positives, self.num_item, self.num_ng = pairs, num_item, num_ng
        self.known = set(pairs)
        self.rows = [(u, i, 0) for u, i in pairs]

    def ng_sample(self):
        negatives = []
        for user, _ in self.positives:
            for _ in range(self.num_ng):
                item = np.random.randint(self.num_item)
                while (user, item) in self.known:
                    item = np.random.randint(self.num_item)
                negatives.append((user, item, 0))
        self.rows = [(u, i, 1) for u, i in self.positives] + negatives

    def __len__(self):
        return (1 + self.num_ng) * len(self.positives)

    def __getitem__(self, index):
        return self.rows[index]


class NCF(nn.Module):
    """Matrix factorization beside an MLP, joined in the last layer."""

    def __init__(self, user_num, item_num, factors, num_layers, dropout):
        super().__init__()
        wide = factors << (num_layers - 1)
        self.gmf = nn.ModuleDict({"user": nn.Embedding(user_num, factors), "item": nn.Embedding(item_num, factors)})
        self.mlp = nn.ModuleDict({"user": nn.Embedding(user_num, wide), "item": nn.Embedding(item_num, wide)})
        self.tower = nn.Sequential()
        for width in (2 * wide >> i for i in range(num_layers)):
            self.tower.extend([nn.Dropout(dropout), nn.Linear(width, width // 2), nn.ReLU()])
        self.predict = nn.Linear(2 * factors, 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.data.normal_(std=0.01)
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                module.bias.data.zero_()
        nn.init.kaiming_uniform_(self.predict.weight, a=1, nonlinearity="sigmoid")

    def forward(self, user, item):
        product = self.gmf["user"](user) * self.gmf["item"](item)
        deep = self.tower(torch.cat([self.mlp["user"](user), self.mlp["item"](item)], dim=-1))
        return self.predict(torch.cat([product, deep], dim=-1)).squeeze(-1)


def metrics(model, test_loader, top_k):
    """A batch is a user's liked item, first, and 99 others."""
    hits, gains = [], []
    for user, item, _ in test_loader:
        best = item[model(user, item).topk(top_k).indices].tolist()
        wanted = item[0].item()
        hits.append(float(wanted in best))
        gains.append(1 / np.log2(best.index(wanted) + 2) if wanted in best else 0.0)
    return np.mean(hits), np.mean(gains)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--top_k", type=int, default=10)
    parser.add_argument("--factor_num", type=int, default=8)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--num_ng", type=int, default=4, help="negatives for each positive in training")
    parser.add_argument("--test_num_ng", type=int, default=99, help="negatives for each positive in the test")
    args = parser.parse_args([])
    torch.manual_seed(seed)
    np.random.seed(seed)

    train_pairs, test_pairs, user_num, item_num = load_all()
    train_set = NCFData(train_pairs, item_num, args.num_ng)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(NCFData(test_pairs, item_num), batch_size=args.test_num_ng + 1, shuffle=False)
    model = NCF(user_num, item_num, args.factor_num, args.num_layers, args.dropout)
    loss_function = nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    history, best_hr = [], 0.0

    with watch(model, optimizer, loader=train_loader):
        for epoch in range(args.epochs):
            model.train()
            start_time = time.time()
            train_loader.dataset.ng_sample()
            for user, item, label in train_loader:
                model.zero_grad()
                loss = loss_function(model(user, item), label.float())
                loss.backward()
                optimizer.step()
                history.append(loss.item())

            model.eval()
            HR, NDCG = metrics(model, test_loader, args.top_k)
            elapsed = time.strftime("%H: %M: %S", time.gmtime(time.time() - start_time))
            print(f"The time elapse of epoch {epoch:03d} is: {elapsed}")
            print(f"HR: {HR:.3f}\tNDCG: {NDCG:.3f}")
            if best_hr < HR:
                best_hr, best_ndcg, best_epoch = HR, NDCG, epoch
                (folder / "models").mkdir(exist_ok=True)
                torch.save(model, folder / "models" / "NeuMF-end.pth")
    print(f"End. Best epoch {best_epoch:03d}: HR = {best_hr:.3f}, NDCG = {best_ndcg:.3f}")
    return Result("hit rate at 10", float(best_hr), 0.4, history, {"model": model, "optimizer": optimizer})
