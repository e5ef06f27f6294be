"""Classify handwritten digits with a multilayer perceptron: python examples/mlp.py --layer spm."""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from pairmix import SPMLinear, param_groups


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", choices=["dense", "spm"], default="spm")
    parser.add_argument("--width", type=int, default=2048, help="size of the hidden layers")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on three quarters of the digits, test on the rest."""
    args = arguments()
    torch.manual_seed(args.seed)
    digits = load_digits()  # 1,797 pictures of 8x8 pixels, 0 to 16
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images))
    test, train = order.split([len(order) // 4, len(order) - len(order) // 4])

    linear = SPMLinear if args.layer == "spm" else nn.Linear  # the change
    model = nn.Sequential(
        nn.Linear(64, args.width),
        nn.ReLU(),
        linear(args.width, args.width),
        nn.ReLU(),
        nn.Linear(args.width, 10),
    )
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
