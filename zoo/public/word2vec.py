"""After Andras7/word2vec-pytorch: skip-gram with negative samples, sparse embeddings, SparseAdam for each iteration."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn import init
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from zoo.public import Result
from zoo.public.data import OBJECTS, SUBJECTS, VERBS, sentences


class DataReader:
    NEGATIVE_TABLE_SIZE = 1e5

    def __init__(self, inputFileName, min_count):
        self.negatives = []
        self.discards = []
        self.negpos = 0
        self.inputFileName = inputFileName
        self.word2id, self.id2word, self.word_frequency = {}, {}, {}
        self.token_count = 0
        self.sentences_count = 0
        self.read_words(min_count)
        self.initTableNegatives()
        self.initTableDiscards()

    def read_words(self, min_count):
        word_frequency = {}
        with open(self.inputFileName, encoding="utf8") as f:
            for line in f:
                words = line.split()
                if len(words) > 1:
                    self.sentences_count += 1
                    for word in words:
                        self.token_count += 1
                        word_frequency[word] = word_frequency.get(word, 0) + 1
        wid = 0
        for w, c in word_frequency.items():
            if c < min_count:
                continue
            self.word2id[w] = wid
            self.id2word[wid] = w
            self.word_frequency[wid] = c
            wid += 1
        print(f"Total embeddings: {len(self.word2id)}")

    def initTableDiscards(self):
        t = 0.1
        f = np.array(list(self.word_frequency.values())) / self.token_count
        self.discards = np.sqrt(t / f) + (t / f)

    def initTableNegatives(self):
        pow_frequency = np.array(list(self.word_frequency.values())) ** 0.5
        count = np.round(pow_frequency / sum(pow_frequency) * DataReader.NEGATIVE_TABLE_SIZE)
        self.negatives = np.concatenate([[wid] * int(c) for wid, c in enumerate(count)])
        np.random.shuffle(self.negatives)

    def getNegatives(self, target, size):
        response = self.negatives[self.negpos : self.negpos + size]
        self.negpos = (self.negpos + size) % len(self.negatives)
        if len(response) != size:
            return np.concatenate((response, self.negatives[0 : self.negpos]))
        return response


class Word2vecDataset(Dataset):
    def __init__(self, data, window_size):
        self.data = data
        self.window_size = window_size
        self.input_file = open(data.inputFileName, encoding="utf8")  # noqa: SIM115

    def __len__(self):
        return self.data.sentences_count

    def __getitem__(self, idx):
        while True:
            line = self.input_file.readline()
            if not line:
                self.input_file.seek(0, 0)
                line = self.input_file.readline()
            words = line.split()
            word_ids = [
                self.data.word2id[w]
                for w in words
                if w in self.data.word2id and np.random.rand() < self.data.discards[self.data.word2id[w]]
            ]
            boundary = np.random.randint(1, self.window_size)
            return [
                (u, v, self.data.getNegatives(v, 5))
                for i, u in enumerate(word_ids)
                for j, v in enumerate(word_ids[max(i - boundary, 0) : i + boundary])
                if max(i - boundary, 0) + j != i
            ]

    @staticmethod
    def collate(batches):
        all_u = [u for batch in batches for u, _, _ in batch]
        all_v = [v for batch in batches for _, v, _ in batch]
        all_neg_v = [neg_v for batch in batches for _, _, neg_v in batch]
        return torch.LongTensor(all_u), torch.LongTensor(all_v), torch.LongTensor(np.array(all_neg_v))


class SkipGramModel(nn.Module):
    def __init__(self, emb_size, emb_dimension):
        super().__init__()
        self.u_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        self.v_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        initrange = 1.0 / emb_dimension
        init.uniform_(self.u_embeddings.weight.data, -initrange, initrange)
        init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u = self.u_embeddings(pos_u)
        emb_v = self.v_embeddings(pos_v)
        emb_neg_v = self.v_embeddings(neg_v)

        score = torch.sum(torch.mul(emb_u, emb_v), dim=1)
        score = torch.clamp(score, max=10, min=-10)
        score = -F.logsigmoid(score)

        neg_score = torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(2)
        neg_score = torch.clamp(neg_score, max=10, min=-10)
        neg_score = -torch.sum(F.logsigmoid(-neg_score), dim=1)
        return torch.mean(score + neg_score)

    def save_embedding(self, id2word, file_name):
        embedding = self.u_embeddings.weight.cpu().data.numpy()
        with open(file_name, "w") as f:
            f.write(f"{len(id2word)} {embedding.shape[1]}\n")
            for wid, w in id2word.items():
                f.write(f"{w} {' '.join(map(str, embedding[wid]))}\n")


class Word2VecTrainer:
    def __init__(
        self, input_file, output_file, watch, emb_dimension, batch_size, window_size, iterations, initial_lr, min_count
    ):
        self.data = DataReader(input_file, min_count)
        self.dataset = Word2vecDataset(self.data, window_size)
        self.dataloader = DataLoader(
            self.dataset, batch_size=batch_size, shuffle=False, num_workers=0, collate_fn=self.dataset.collate
        )
        self.output_file_name = output_file
        self.watch = watch
        self.iterations, self.initial_lr = iterations, initial_lr
        self.skip_gram_model = SkipGramModel(len(self.data.word2id), emb_dimension)
        self.losses = []

    def train(self):
        for iteration in range(self.iterations):
            print(f"\n\n\nIteration: {iteration + 1}")
            optimizer = optim.SparseAdam(self.skip_gram_model.parameters(), lr=self.initial_lr)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(self.dataloader))
            running_loss = 0.0
            with self.watch(self.skip_gram_model, optimizer, loader=self.dataloader, scheduler=scheduler):
                for i, sample_batched in enumerate(tqdm(self.dataloader)):
                    if len(sample_batched[0]) > 1:
                        pos_u, pos_v, neg_v = sample_batched
                        optimizer.zero_grad()
                        loss = self.skip_gram_model.forward(pos_u, pos_v, neg_v)
                        loss.backward()
                        optimizer.step()
                        scheduler.step()
                        self.losses.append(loss.item())
                        running_loss = running_loss * 0.9 + loss.item() * 0.1
                        if i > 0 and i % 50 == 0:
                            print(f" Loss: {running_loss}")
            self.skip_gram_model.save_embedding(self.data.id2word, self.output_file_name)
        self.dataset.input_file.close()
        return optimizer


def same_role(trainer):
    """How often the nearest word of a verb, a subject or an object has the same role."""
    roles = {w: role for role, words in enumerate((SUBJECTS, VERBS, OBJECTS)) for w in words.replace("|", " ").split()}
    words = [w for w in roles if w in trainer.data.word2id and w not in ("the", "a", "no")]
    vectors = F.normalize(trainer.skip_gram_model.u_embeddings.weight.data[[trainer.data.word2id[w] for w in words]])
    nearest = (vectors @ vectors.t()).fill_diagonal_(-2).argmax(1)
    return float(np.mean([roles[words[i]] == roles[words[j]] for i, j in enumerate(nearest.tolist())]))


def main(watch, seed, folder):
    np.random.seed(seed)
    torch.manual_seed(seed)
    (folder / "input.txt").write_text("\n".join(sentences(3500)) + "\n")
    w2v = Word2VecTrainer(
        input_file=str(folder / "input.txt"), output_file=str(folder / "out.vec"), watch=watch, emb_dimension=24,
        batch_size=16, window_size=4, iterations=4, initial_lr=0.02, min_count=5,
    )  # fmt: skip
    optimizer = w2v.train()
    objects = {"model": w2v.skip_gram_model, "optimizer": optimizer}
    return Result("nearest words of the same role", same_role(w2v), 0.7, w2v.losses, objects)
