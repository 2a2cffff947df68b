"""Lightning: the Trainer takes ranks and address from the launcher's environment."""

import os
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch):
        inputs, targets = batch
        self.last = (self.layers(inputs) - targets).square().mean()
        return self.last

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(128, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    model = Regression()
    trainer.fit(model, loader)
    total = trainer.strategy.reduce(model.last.detach(), reduce_op="mean")
    if trainer.is_global_zero:
        print(f"final loss {total.item():.9g} {trainer.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
