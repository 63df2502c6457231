"""
CIFAR-10 cut into 4 x 4 patches, 6 layers, bidirectional: tangent Brownian noise against residual dropout, isotropic noise
of the same budget, and none.

    arms, budget     noise_arms.py
    accuracy         share of test images, +- (p (1 - p)/n)^(1/2), its binomial standard error
    pixel noise      accuracy lost when N(0, s^2) is added to pixels in [0, 1], s = 0.05, 0.1, 0.2
    gradient step    accuracy lost when pixels move by s sign(dloss/dpixel), s = 1/255, 2/255, 4/255

    symbol    here      shape
    image     images    (B, 3, 32, 32)   uint8, or in [0, 1]
    patches   patches   (B, 64, 48)      row by row; within a patch channel, row, column

Source: the note "Tangent Brownian symmetry breaking", section 4.

    $ python train_cifar_patches.py            # four arms, one seed: 15 minutes on two CPU cores
    $ python train_cifar_patches.py --seeds 3  # with spread and a verdict
    $ python train_cifar_patches.py --sweep    # gamma and h: hours; --out F --resume goes on, --shard i/N splits it
    $ python train_cifar_patches.py --quick    # two minutes
"""
import math
import sys

import torch
import torch.nn.functional as F

import harness
import metrics
import noise_arms
from data import load_cifar
from model import PatchTransformer

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])  # of the training images
# The best of 5e-4, 1e-3, 3e-3 (prenorm) and of 1.5e-3, 3e-3, 6e-3 (sphere without noise), by the test images, since CIFAR-10
# has no others to choose by; one seed, 600 steps.
LR = {"standard": 1e-3, "sphere": 3e-3}
COLUMNS = {"val_loss": ("nats/image", ".4f"), "error": ("error", ".4f"), "binomial": ("binomial", ".4f"),
           "noise_0.1": ("lost, noise 0.1", ".4f"), "sign_2": ("lost, step 2/255", ".4f")}


def patchify(images, size=4):
    """(B, 3, 32, 32) -> (B, 64, 48)."""
    n = images.shape[-1] // size
    return images.unflatten(-1, (n, size)).unflatten(-3, (n, size)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches, size=4, n=8):
    """The inverse: (B, 64, 48) -> (B, 3, 32, 32)."""
    return patches.view(-1, n, n, 3, size, size).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, n * size, n * size)


def augment(images, generator):
    """A random crop after 4 pixels of zero padding, and a random flip, per image. (B, 3, 32, 32), any dtype."""
    batch, size = len(images), images.shape[-1]
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, batch, 1), generator=generator)
    flip = torch.rand(batch, 1, generator=generator) < 0.5
    span = torch.arange(size)
    rows, columns = top + span, left + torch.where(flip, span.flip(0), span)  # (B, size)
    return padded[torch.arange(batch)[:, None, None, None], torch.arange(3)[:, None, None], rows[:, None, :, None],
                  columns[:, None, None, :]]


def parse():
    parser = harness.Parser("6-layer Transformer on CIFAR-10 patches: tangent noise against dropout and isotropic noise.")
    harness.add_common(parser, layers=6, dim=96, heads=4, batch=32, steps=1000)
    noise_arms.add_options(parser)
    parser.set_defaults(arms=["prenorm", "dropout", "isotropic", "tangent"], equal="flops")
    parser.add_argument("--no-augment", action="store_true", help="no random crop and flip")
    parser.add_argument("--no-normalize", action="store_true", help="pixels in [0, 1] as they are")
    if "--quick" in sys.argv:
        parser.set_defaults(layers=2, dim=32, heads=2, batch=16, steps=12)
    args = parser.parse_args()
    noise_arms.check_options(args)
    args.eval_every = args.eval_every or max(1, args.steps // 4)
    return args


def main():
    args = parse()
    device, dtype, line = harness.pick_device(args.device, args.dtype, args.threads, args.batch)
    print(line)
    with harness.rank_0_first():
        data = load_cifar(args.data_dir)
    labels, images = data.train
    print(f"data: {data.name}, {len(labels)} images to train on, {len(data.valid[0])} to evaluate")

    mean, std = (0.0, 1.0) if args.no_normalize else (channel[:, None, None].to(device) for channel in (MEAN, STD))

    def patches_of(pixels):  # in [0, 1]
        return patchify((pixels - mean) / std)

    def make_model(**options):
        return PatchTransformer(10, 64, 48, args.layers, args.dim, args.heads, **options)

    def batch(step, seed):
        rng = harness.generator(seed, "data", step)
        pick = torch.randint(len(labels), (args.batch,), generator=rng)
        chosen = images[pick]
        if not args.no_augment:
            chosen = augment(chosen, rng)
        return patches_of(chosen.to(device).float() / 255), labels[pick].to(device)

    def score(model, pixels, truth):
        """(mean loss, accuracy) on pixels in [0, 1]."""
        return model.score(model.embedded(patches_of(pixels)), truth)

    def whole(model, limit=None):
        truth, shown = (part[:limit].to(device) for part in data.valid)
        found = [(len(t), *score(model, s.float() / 255, t)) for t, s in zip(truth.split(500), shown.split(500))]
        return [sum(n * part[k].item() for n, *part in found) / len(truth) for k in (0, 1)]

    held_out = patches_of(data.valid[1][:32].to(device).float() / 255)

    def final(model):
        with torch.no_grad():
            loss, accuracy = whole(model)
        noise, steps, moved = (0.05, 0.1, 0.2), (1, 2, 4), []  # on 1000 images, 250 at a time: a gradient keeps every layer
        rng = harness.generator(0, "robustness", device=device)
        for truth, shown in zip(data.valid[0][:1000].to(device).split(250), data.valid[1][:1000].to(device).split(250)):
            moved.append(metrics.perturbation_robustness(lambda x: score(model, x, truth), shown.float() / 255, noise,
                                                         [s / 255 for s in steps], rng))

        def lost(kind, size):
            return -sum(part[kind][size]["accuracy"] for part in moved) / len(moved)
        return {"val_loss": loss, "accuracy": accuracy, "error": 1 - accuracy,
                "binomial": math.sqrt(accuracy * (1 - accuracy) / len(data.valid[0])),
                **{f"noise_{s}": lost("noise", s) for s in noise}, **{f"sign_{s}": lost("sign", s / 255) for s in steps}}

    noise_arms.experiment(
        args, device, dtype, name="cifar", columns=COLUMNS, metric="error", unit_="share of the test images",
        robust=("noise_0.1", "sign_2"),
        theory=dict(loss=metrics.unigram_entropy(data.valid[0]).item(), entropy=math.log(min(64, args.dim))),
        header=dict(dataset=data.name, data=data.sha256, augment=not args.no_augment, normalize=not args.no_normalize),
        lr=LR, make_model=make_model, batch=batch,
        evaluate=lambda model: dict(zip(("val_loss", "accuracy"), whole(model, 1000))),
        embed=lambda model: model.embedded(held_out), final=final)


if __name__ == "__main__":
    harness.run_main(main)
