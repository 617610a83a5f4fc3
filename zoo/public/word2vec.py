"""After Andras7/word2vec-pytorch: skip-gram with negative samples, sparse embeddings, SparseAdam for each iteration."""

from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from zoo.public import Result
from zoo.public.data import OBJECTS, SUBJECTS, VERBS, sentences


class DataReader:
    """Counts words, keeps a table of negatives that is read in order, and how likely each word is kept."""

    TABLE = 100_000

    def __init__(self, path, min_count):
        self.path, self.position = path, 0
        with open(path, encoding="utf8") as file:
            lines = [line.split() for line in file]
        self.num_sentences = len(lines)
        counts = Counter(word for line in lines for word in line)
        self.words = [word for word, count in counts.items() if count >= min_count]
        self.word2id = {word: i for i, word in enumerate(self.words)}
        frequency = np.array([counts[word] for word in self.words]) / sum(counts.values())
        print(f"Total embeddings: {len(self.words)}")
        share = frequency**0.5 / (frequency**0.5).sum()
        self.table = np.repeat(np.arange(len(self.words)), np.round(share * self.TABLE).astype(int))
        np.random.shuffle(self.table)
        self.keep = np.sqrt(0.1 / frequency) + 0.1 / frequency

    def negatives(self, size):
        rows = np.arange(self.position, self.position + size) % len(self.table)
        self.position = (self.position + size) % len(self.table)
        return self.table[rows]


class SkipGrams(Dataset):
    """All pairs of a line of the open file, whichever index is asked for; a line is read after the other."""

    def __init__(self, reader, window_size):
        self.reader, self.window_size = reader, window_size
        self.file = open(reader.path, encoding="utf8")  # noqa: SIM115

    def __len__(self):
        return self.reader.num_sentences

    def __getitem__(self, index):
        line = self.file.readline()
        if not line:
            self.file.seek(0)
            line = self.file.readline()
        ids = [self.reader.word2id[word] for word in line.split() if word in self.reader.word2id]
        ids = [i for i in ids if np.random.rand() < self.reader.keep[i]]
        reach = np.random.randint(1, self.window_size)
        pairs = [(a, b) for a in range(len(ids)) for b in range(max(a - reach, 0), min(a + reach, len(ids))) if a != b]
        return [(ids[a], ids[b], self.reader.negatives(5)) for a, b in pairs]

    @staticmethod
    def collate(lines):
        triples = [triple for line in lines for triple in line]
        return tuple(torch.as_tensor(np.array(part), dtype=torch.long) for part in zip(*triples))


class SkipGramModel(nn.Module):
    def __init__(self, vocabulary, dimension):
        super().__init__()
        self.u_embeddings = nn.Embedding(vocabulary, dimension, sparse=True)
        self.v_embeddings = nn.Embedding(vocabulary, dimension, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight, -1 / dimension, 1 / dimension)
        nn.init.zeros_(self.v_embeddings.weight)

    def forward(self, center, context, negatives):
        u, v, n = self.u_embeddings(center), self.v_embeddings(context), self.v_embeddings(negatives)
        near = (u * v).sum(1).clamp(-10, 10)
        far = (n @ u[:, :, None]).squeeze(2).clamp(-10, 10)
        return -(F.logsigmoid(near) + F.logsigmoid(-far).sum(1)).mean()

    def save_embedding(self, words, path):
        vectors = self.u_embeddings.weight.detach().numpy()
        with open(path, "w") as file:
            print(*vectors.shape, file=file)
            for word, vector in zip(words, vectors):
                print(word, *vector.tolist(), file=file)


class Word2VecTrainer:
    def __init__(self, input_file, output_file, watch, dimension, batch_size, window_size, iterations, initial_lr):
        self.reader = DataReader(input_file, min_count=5)
        self.dataset = SkipGrams(self.reader, window_size)
        self.dataloader = DataLoader(self.dataset, batch_size=batch_size, shuffle=False, collate_fn=SkipGrams.collate)
        self.model = SkipGramModel(len(self.reader.words), dimension)
        self.output_file, self.watch = output_file, watch
        self.iterations, self.initial_lr = iterations, initial_lr
        self.losses = []

    def train(self):
        for iteration in range(1, self.iterations + 1):
            print(f"\n\n\nIteration: {iteration}")
            optimizer = SparseAdam(self.model.parameters(), lr=self.initial_lr)
            scheduler = CosineAnnealingLR(optimizer, len(self.dataloader))
            smoothed = 0.0
            with self.watch(self.model, optimizer, loader=self.dataloader, scheduler=scheduler):
                for i, batch in enumerate(tqdm(self.dataloader)):
                    optimizer.zero_grad()
                    loss = self.model(*batch)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    self.losses.append(loss.item())
                    smoothed = 0.9 * smoothed + 0.1 * self.losses[-1]
                    if i and i % 50 == 0:
                        print(f" Loss: {smoothed}")
            self.model.save_embedding(self.reader.words, self.output_file)
        self.dataset.file.close()
        return optimizer


def same_role(trainer):
    """How often the nearest word of a verb, a subject or an object has the same role."""
    roles = {w: role for role, words in enumerate((SUBJECTS, VERBS, OBJECTS)) for w in words.replace("|", " ").split()}
    words = [w for w in roles if w in trainer.reader.word2id and w not in ("the", "a", "no")]
    vectors = F.normalize(trainer.model.u_embeddings.weight.data[[trainer.reader.word2id[w] for w in words]])
    nearest = (vectors @ vectors.t()).fill_diagonal_(-2).argmax(1)
    return float(np.mean([roles[words[i]] == roles[words[j]] for i, j in enumerate(nearest.tolist())]))


def main(watch, seed, folder):
    np.random.seed(seed)
    torch.manual_seed(seed)
    (folder / "input.txt").write_text("\n".join(sentences(3500)) + "\n")
    w2v = Word2VecTrainer(
        str(folder / "input.txt"), str(folder / "out.vec"), watch, dimension=24, batch_size=16, window_size=4,
        iterations=4, initial_lr=0.02,
    )  # fmt: skip
    optimizer = w2v.train()
    objects = {"model": w2v.model, "optimizer": optimizer}
    return Result("nearest words of the same role", same_role(w2v), 0.7, w2v.losses, objects)
