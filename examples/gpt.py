"""Train a small GPT on the characters of a text: python examples/gpt.py --layer spm --text my.txt."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from pairmix import SPMTransformerEncoderLayer, param_groups


class GPT(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, layer: str, characters: int, context: int, width: int, depth: int) -> None:
        """Build it of `layer`: dense or spm."""
        super().__init__()
        block = SPMTransformerEncoderLayer if layer == "spm" else nn.TransformerEncoderLayer  # the change
        of_depth = block(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(of_depth, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.readout = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character at every place of texts of shape (batch, length)."""
        length = text.shape[1]
        future = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.token(text) + self.place.weight[:length]
        return self.readout(self.blocks(x, mask=future, is_causal=True))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", choices=["dense", "spm"], default="spm")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on random pieces of the text, then go on from its beginning."""
    args = arguments()
    torch.manual_seed(args.seed)
    text = args.text.read_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    pieces = data.unfold(0, args.context + 1, 1)
    model = GPT(args.layer, len(alphabet), args.context, args.width, args.depth)
    optimizer = torch.optim.AdamW(param_groups(model, lr=args.lr, weight_decay=0.01))
    print(f"{args.layer}: {sum(p.numel() for p in model.parameters()):,} parameters")

    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = pieces[torch.randint(len(pieces), (16,))]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.perf_counter() - start:.1f} s")

    written = data[None, : args.context // 2]
    with torch.inference_mode():
        for _ in range(100):
            scores = model(written[:, -args.context :])[:, -1]
            written = torch.cat([written, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    print("".join(alphabet[index] for index in written[0]))


if __name__ == "__main__":
    main()
