"""transformers' Trainer on a tiny model made here: nothing is downloaded."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(1) - labels).square().mean()}


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows())
        loss = trainer.train().training_loss
    if arguments.process_index == 0:
        print(f"final loss {loss:.9g} {arguments.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
