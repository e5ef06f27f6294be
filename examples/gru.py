"""Read handwritten digits pixel row by pixel row with a GRU: python examples/gru.py --layer spm."""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from pairmix import SPMGRU, param_groups


class Reader(nn.Module):
    """A GRU over the rows of a picture, and a linear map of its last state onto the classes."""

    def __init__(self, layer: str, width: int) -> None:
        """Build it of `layer`: dense or spm."""
        super().__init__()
        gru = SPMGRU if layer == "spm" else nn.GRU  # the change
        self.gru = gru(8, width, batch_first=True)
        self.readout = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the ten classes for pictures of shape (batch, 8 rows, 8 pixels)."""
        _, last = self.gru(images)
        return self.readout(last[0])


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", choices=["dense", "spm"], default="spm")
    parser.add_argument("--width", type=int, default=512, help="size of the state")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on three quarters of the digits, test on the rest."""
    args = arguments()
    torch.manual_seed(args.seed)
    digits = load_digits()  # 1,797 pictures of 8x8 pixels, 0 to 16
    images = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images))
    test, train = order.split([len(order) // 4, len(order) - len(order) // 4])

    model = Reader(args.layer, args.width)
    optimizer = torch.optim.Adam(param_groups(model, lr=args.lr))
    print(f"{args.layer}: {sum(p.numel() for p in model.parameters()):,} parameters")

    def accuracy() -> float:
        with torch.inference_mode():
            return (model(images[test]).argmax(-1) == labels[test]).float().mean().item()

    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = train[torch.randint(len(train), (args.batch,))]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            seconds = time.perf_counter() - start
            print(f"step {step:4}  loss {loss.item():.3f}  test accuracy {accuracy():.1%}  {seconds:.1f} s")


if __name__ == "__main__":
    main()
