"""After guoyang9/NCF: NeuMF with negatives drawn anew each epoch, hit rate and NDCG at 10, the best model pickled."""

import argparse
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data as data

from zoo.public import Result


def load_all(user_num=150, item_num=120):
    """Pairs of users and items that like each other, one of each user left for the test with 99 that do not."""
    rng = np.random.RandomState(0)
    users, items = rng.normal(size=(user_num, 3)), rng.normal(size=(item_num, 3))
    score = users @ items.T + rng.gumbel(size=(user_num, item_num)) * 0.5
    liked = np.argsort(-score, axis=1)[:, :13]
    train_data, test_data, train_mat = [], [], {}
    for u in range(user_num):
        chosen = rng.permutation(liked[u])
        train_data += [[u, int(i)] for i in chosen[1:]]
        train_mat.update({(u, int(i)): 1.0 for i in chosen[1:]})
        others = rng.permutation(np.setdiff1d(np.arange(item_num), liked[u]))[:99]
        test_data += [[u, int(chosen[0])]] + [[u, int(i)] for i in others]
    return train_data, test_data, user_num, item_num, train_mat


class NCFData(data.Dataset):
    def __init__(self, features, num_item, train_mat=None, num_ng=0, is_training=None):
        super().__init__()
        self.features_ps, self.num_item, self.train_mat = features, num_item, train_mat
        self.num_ng, self.is_training = num_ng, is_training
        self.labels = [0 for _ in range(len(features))]

    def ng_sample(self):
        assert self.is_training, "no need to sampling when testing"
        self.features_ng = []
        for u, _ in self.features_ps:
            for _ in range(self.num_ng):
                j = np.random.randint(self.num_item)
                while (u, j) in self.train_mat:
                    j = np.random.randint(self.num_item)
                self.features_ng.append([u, j])
        labels_ps = [1 for _ in range(len(self.features_ps))]
        labels_ng = [0 for _ in range(len(self.features_ng))]
        self.features_fill = self.features_ps + self.features_ng
        self.labels_fill = labels_ps + labels_ng

    def __len__(self):
        return (self.num_ng + 1) * len(self.labels)

    def __getitem__(self, idx):
        features = self.features_fill if self.is_training else self.features_ps
        labels = self.labels_fill if self.is_training else self.labels
        return features[idx][0], features[idx][1], labels[idx]


class NCF(nn.Module):
    def __init__(self, user_num, item_num, factor_num, num_layers, dropout):
        super().__init__()
        wide = factor_num * 2 ** (num_layers - 1)
        self.embed_user_GMF = nn.Embedding(user_num, factor_num)
        self.embed_item_GMF = nn.Embedding(item_num, factor_num)
        self.embed_user_MLP = nn.Embedding(user_num, wide)
        self.embed_item_MLP = nn.Embedding(item_num, wide)
        MLP_modules = []
        for i in range(num_layers):
            input_size = factor_num * 2 ** (num_layers - i)
            MLP_modules.append(nn.Dropout(p=dropout))
            MLP_modules.append(nn.Linear(input_size, input_size // 2))
            MLP_modules.append(nn.ReLU())
        self.MLP_layers = nn.Sequential(*MLP_modules)
        self.predict_layer = nn.Linear(factor_num * 2, 1)
        for m in self.modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=0.01)
            elif isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                m.bias.data.zero_()
        nn.init.kaiming_uniform_(self.predict_layer.weight, a=1, nonlinearity="sigmoid")

    def forward(self, user, item):
        output_GMF = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        interaction = torch.cat((self.embed_user_MLP(user), self.embed_item_MLP(item)), -1)
        output_MLP = self.MLP_layers(interaction)
        prediction = self.predict_layer(torch.cat((output_GMF, output_MLP), -1))
        return prediction.view(-1)


def metrics(model, test_loader, top_k):
    HR, NDCG = [], []
    for user, item, _ in test_loader:
        predictions = model(user, item)
        _, indices = torch.topk(predictions, top_k)
        recommends = torch.take(item, indices).cpu().numpy().tolist()
        gt_item = item[0].item()
        HR.append(1 if gt_item in recommends else 0)
        NDCG.append(np.reciprocal(np.log2(recommends.index(gt_item) + 2)) if gt_item in recommends else 0)
    return np.mean(HR), np.mean(NDCG)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout rate")
    parser.add_argument("--batch_size", type=int, default=128, help="batch size for training")
    parser.add_argument("--epochs", type=int, default=12, help="training epoches")
    parser.add_argument("--top_k", type=int, default=10, help="compute metrics@top_k")
    parser.add_argument("--factor_num", type=int, default=8, help="predictive factors numbers in the model")
    parser.add_argument("--num_layers", type=int, default=3, help="number of layers in MLP model")
    parser.add_argument("--num_ng", type=int, default=4, help="sample negative items for training")
    parser.add_argument("--test_num_ng", type=int, default=99, help="sample part of negative items for testing")
    args = parser.parse_args([])
    torch.manual_seed(seed)
    np.random.seed(seed)

    train_data, test_data, user_num, item_num, train_mat = load_all()
    train_dataset = NCFData(train_data, item_num, train_mat, args.num_ng, True)
    test_dataset = NCFData(test_data, item_num, train_mat, 0, False)
    train_loader = data.DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, num_workers=0)
    test_loader = data.DataLoader(test_dataset, batch_size=args.test_num_ng + 1, shuffle=False, num_workers=0)

    model = NCF(user_num, item_num, args.factor_num, args.num_layers, args.dropout)
    loss_function = nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    history = []
    count, best_hr = 0, 0
    with watch(model, optimizer, loader=train_loader):
        for epoch in range(args.epochs):
            model.train()
            start_time = time.time()
            train_loader.dataset.ng_sample()
            for user, item, label in train_loader:
                label = label.float()
                model.zero_grad()
                prediction = model(user, item)
                loss = loss_function(prediction, label)
                loss.backward()
                optimizer.step()
                history.append(loss.item())
                count += 1

            model.eval()
            HR, NDCG = metrics(model, test_loader, args.top_k)
            elapsed_time = time.time() - start_time
            elapsed = time.strftime("%H: %M: %S", time.gmtime(elapsed_time))
            print(f"The time elapse of epoch {epoch:03d} is: {elapsed}")
            print(f"HR: {np.mean(HR):.3f}\tNDCG: {np.mean(NDCG):.3f}")
            if best_hr < HR:
                best_hr, best_ndcg, best_epoch = HR, NDCG, epoch
                os.makedirs(folder / "models", exist_ok=True)
                torch.save(model, folder / "models" / "NeuMF-end.pth")
    print(f"End. Best epoch {best_epoch:03d}: HR = {best_hr:.3f}, NDCG = {best_ndcg:.3f}")
    return Result("hit rate at 10", float(best_hr), 0.4, history, {"model": model, "optimizer": optimizer})
