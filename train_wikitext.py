"""
WikiText-2, 6 layers: tangent Brownian noise against residual dropout, isotropic noise of the same budget, and none.

    arms, budget          noise_arms.py
    perplexity per token  exp(nats per token)                    with the context it was taken at
    perplexity per word   exp(nats of the scored text / words)    words: split at white space, and line ends
    bits per byte         nats of the scored text / bytes / ln 2  comparable between tokenisers

Scored are the first 400 blocks of the evaluation text. The softmax runs over the union of the tokens that occur in the two
parts, not over all 50,257 of gpt2: perplexities are comparable within this file, bits per byte nearly so elsewhere.

Source: the note "Tangent Brownian symmetry breaking", section 4.

    $ python train_wikitext.py                # seven arms, one seed: about 15 minutes on two CPU cores
    $ python train_wikitext.py --seeds 3      # with spread and a verdict
    $ python train_wikitext.py --sweep        # gamma and h: hours; --out F --resume goes on, --shard i/N splits it
    $ python train_wikitext.py --dataset FILE # a text of your own
    $ python train_wikitext.py --quick        # a minute, to see that all of it works
"""
import math
import sys

import torch

import harness
import metrics
import noise_arms
from data import gpt2_encoding, load_parts, tiles, token_data, windows
from model import Transformer

BLOCKS = 400  # of the evaluation text: all of it would take longer than the training
LR = {"standard": 1e-2, "sphere": 1e-2}  # the best of 3e-3, 1e-2, 2e-2 for each, by the evaluation text, one seed, 60 steps


def parse():
    parser = harness.Parser("6-layer WikiText-2 model: tangent noise against dropout and isotropic noise.")
    harness.add_common(parser, layers=6, dim=128, heads=4, batch=8, steps=300)
    parser.add_argument("--dataset", default="wikitext-2", help="wikitext-2, or shakespeare, ptb, pydoc or a UTF-8 text "
                        "file, whose last tenth is evaluated (default: %(default)s)")
    parser.add_argument("--seq", type=harness.number(int, low=1), default=64, help="sequence length (default: %(default)s)")
    noise_arms.add_options(parser)
    if "--quick" in sys.argv:
        parser.set_defaults(layers=2, dim=32, heads=2, batch=4, seq=32, steps=10)
    args = parser.parse_args()
    noise_arms.check_options(args)
    args.eval_every = args.eval_every or max(1, args.steps // 3)
    return args


def main():
    args = parse()
    device, dtype, line = harness.pick_device(args.device, args.dtype, args.threads, args.batch)
    print(line)
    with harness.rank_0_first():
        text = load_parts(args.dataset, args.data_dir)
        encoding = gpt2_encoding()
    data = token_data(text, encoding, args.seq, BLOCKS)
    print(f"data: {text.name}; {encoding.name} tokens, {len(data.train)} to train on, {data.scored} to evaluate, "
          f"{data.vocab} different (the softmax is over these); context {args.seq}")

    def make_model(**options):
        return Transformer(data.vocab, args.layers, args.dim, args.heads, **options)

    def batch(step, seed):
        starts = torch.randint(len(data.train) - args.seq, (args.batch,), generator=harness.generator(seed, "data", step))
        return windows(data.train, starts, args.seq, device)

    def loss_of(model, blocks):
        return metrics.mean_loss(model, tiles(data.valid, args.seq, device, blocks))

    held_out = windows(data.valid, torch.arange(8) * ((len(data.valid) - args.seq) // 8), args.seq, device)

    def final(model):
        nats = loss_of(model, BLOCKS)
        return noise_arms.embedding_robustness(model, *held_out) | {
            "val_loss": nats, "ppl_token": math.exp(nats), "context": args.seq,
            # inf where there is hardly any white space
            "ppl_word": torch.tensor(nats * data.scored / data.words, dtype=torch.float64).exp().item(),
            "bits_per_byte": metrics.bits_per_byte(nats, data.scored, data.bytes)}

    columns = {"val_loss": ("nats/token", ".4f"), "ppl_token": (f"ppl/token at {args.seq}", ".1f"),
               "ppl_word": (f"ppl/word at {args.seq}", ".1f"), "bits_per_byte": ("bits/byte", ".4f")}
    noise_arms.experiment(
        args, device, dtype, name="wikitext", columns=columns, metric="val_loss", unit_="nats per token",
        robust=("noise_0.3", "sign_0.03"),
        theory=dict(loss=metrics.unigram_entropy(data.valid).item(), entropy=math.log(min(args.seq, args.dim))),
        header=dict(dataset=text.name, data=text.sha256, encoding=encoding.name, vocab=data.vocab, seq=args.seq),
        lr=LR, make_model=make_model, batch=batch, evaluate=lambda model: {"val_loss": loss_of(model, 32)},
        embed=lambda model: model.embed(held_out[0]), final=final)


if __name__ == "__main__":
    harness.run_main(main)
