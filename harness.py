"""
Plumbing shared by the trainers: user errors, the command line, device and precision, one training loop with exact resume,
checkpoints, progress, results. No mathematics of the blocks is in here; data.py has the data.

A run is a folder: config.json (what was asked for, versions, device), metrics.jsonl (one line per step), checkpoint.pt
(and checkpoint.prev.pt), result.json (written last: its presence means done), timing.json (all that differs between
two equal runs). Every random draw comes from a generator seeded by (seed, purpose, step): nothing has to be rewound on
resume, and an evaluation more or less changes no training number.
"""
import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

import numpy as np
import torch

FORMAT = 1  # of checkpoint.pt
WEIGHT_DECAY = 0.1  # of every training
# Under `torchrun --nproc_per_node=N` each rank takes its part of every batch; rank 0 alone evaluates, prints and writes.
RANK, WORLD = [int(os.environ[name]) if torch.distributed.is_torchelastic_launched() else alone
               for name, alone in (("RANK", 0), ("WORLD_SIZE", 1))]


# ------------------------------------------------------------------------------------------------ user errors

class UserError(Exception):
    """One clear line for the user: what was wrong and what to do."""


def run_main(main, smaller="--batch, --seq, --dim or --layers",
             again="go on with the same command and --resume --out FOLDER"):
    """main(); what the user can mend as one line on stderr and exit code 2, Ctrl-C with 130; --debug shows tracebacks.
    smaller, again: the script's way out of too little memory, and of Ctrl-C."""
    try:
        main()
    except (UserError, OSError, RuntimeError, KeyboardInterrupt) as error:
        full = isinstance(error, RuntimeError)  # what torch raises where there is not enough memory
        if "--debug" in sys.argv or full and "memory" not in str(error):
            raise
        line = f"error: out of memory: take a smaller {smaller}" if full else f"error: {error}"
        if interrupted := isinstance(error, KeyboardInterrupt):
            line = str(error) or f"interrupted: {again}"
        say_last(line)
        sys.exit(130 if interrupted else 2)  # 130: 128 + SIGINT, what a shell expects
    if WORLD > 1:
        torch.distributed.destroy_process_group()


def say_last(line):
    """The line on stderr with which this process ends."""
    if RANK:
        time.sleep(5)  # rank 0 mostly has the same to say, and torchrun then ends this process before it speaks
    print(line, file=sys.__stderr__ if RANK else sys.stderr, flush=True)


@contextlib.contextmanager
def writing(path):
    """Disk full, read-only or vanished folders become a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; what was there is kept. Free space or choose "
                        "another folder with --out") from error


def write_all(file, data, path):
    """All of data into an unbuffered file: a full disk is met here, not when the file is closed, and cuts no line short."""
    with writing(path):
        while data:
            data = data[file.write(data):]


def write_atomic(path, data, before=None):
    """Bytes into a temporary file beside path, flushed, then renamed: path holds the old or the new, never a part.
    before(temporary) is called between the two. The temporary name is this process's own: shards share a folder."""
    if RANK:
        return
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if before:
                before(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # gone already, if all went well


def write_json(path, value):
    """value as JSON, written atomically. Numbers that are not finite become null: JSON has none."""
    with writing(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(finite(value), indent=1) + "\n").encode())


def finite(value):
    """value with every float that is not finite, at any depth, replaced by None."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------------- the command line

def number(kind, low=-math.inf, above=-math.inf, high=math.inf):
    """An argparse type: a finite int or float, >= low or > above, and <= high."""
    def parse(text):
        value = kind(text)
        if not (math.isfinite(float(text)) and low <= value <= high and value > above):
            bound = (f">= {low}" if low > -math.inf else f"> {above}") + f" and <= {high}" * (high < math.inf)
            raise argparse.ArgumentTypeError(f"must be a finite number {bound}, not {text}")
        return value
    parse.__name__ = kind.__name__
    return parse


def folder(text):
    """An argparse type: a path. An empty one, as an unset variable of the shell gives, is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, not an empty name")
    return pathlib.Path(text)


class Parser(argparse.ArgumentParser):
    """Dashed flags with underscores accepted; a bad value is one line on stderr, exit code 2."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args=None):
        words = sys.argv[1:] if args is None else args
        dashed = []
        for word in words:
            flag, equals, value = word.partition("=")
            dashed.append((flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value)
        args = super().parse_args(dashed)
        for name, what in (("resume", "the folder to go on with"), ("shard", "one folder for all parts of the sweep")):
            if getattr(args, name, None) and args.out is None:
                self.error(f"--{name} needs --out, {what}")
        data_dir = getattr(args, "data_dir", None)
        if data_dir and not data_dir.is_dir():
            self.error(f"--data-dir {data_dir}: no such folder")
        return args

    def error(self, message):
        say_last(f"error: {message} (see --help)")
        sys.exit(2)


def add_common(parser, **defaults):
    """The options every trainer has; defaults are the trainer's own."""
    count = number(int, low=1)
    options = [
        ("--device", str, "auto", "auto, cpu, cuda or mps"),
        ("--dtype", str, "auto", "auto, float32, bfloat16 or float16 (mixed precision; float32 on a CPU by default)"),
        ("--seed", number(int, low=0, high=2 ** 31), 0, "first seed"),  # each seeds others: 1000 times it is one
        ("--seeds", count, 1, "number of seeds: seed, seed + 1, ..."),
        ("--steps", count, None, "training steps"),
        ("--batch", count, None, "sequences per step"),
        ("--layers", count, None, "layers"),
        ("--dim", count, None, "width d"),
        ("--heads", count, None, "heads"),
        ("--eval-every", count, None, "steps between evaluations on part of the validation set (default: 3 or 4 a run)"),
        ("--data-dir", folder, os.environ.get("NANOSPHERE_DATA") or None,
         "folder to look for data in before the cache and the download; $NANOSPHERE_DATA names it too"),
        ("--out", folder, None, "folder for the results (default: a new one below runs/)"),
        ("--threads", number(int, low=1, high=1024), None, "CPU threads (default: all cores)"),
    ]
    for flag, kind, default, text in options:
        default = defaults.get(flag[2:].replace("-", "_"), default)
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(flag, type=kind, default=default, metavar=flag[2:].upper(), help=text + shown)
    parser.add_argument("--lr", nargs="+", type=number(float, above=0), metavar="LR",
                        help="peak learning rate, one for all arms or one for each (default: the arm's own)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in --out; finished ones are kept")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: to see that all of it works")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def peak_lr(args, arm, default):
    """The learning rate of an arm from --lr and --arms."""
    if args.lr is None:
        return default
    if len(args.lr) not in (1, len(args.arms)):
        raise UserError(f"--lr has {len(args.lr)} values for {len(args.arms)} arms: give one for all, or one for each")
    return args.lr[args.arms.index(arm) if len(args.lr) > 1 else 0]


def pick_device(name, dtype, threads=None, batch=WORLD):
    """(device, autocast dtype or None, one line saying what was chosen and why). Under torchrun the ranks meet here;
    batch, which they share, must be a multiple of their number."""
    if threads:
        torch.set_num_threads(threads)
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name, why = next((d, "found") for d in ("cuda", "mps", "cpu") if available[d])
    elif name.split(":")[0] not in available:
        raise UserError(f"unknown --device {name}: auto, cpu, cuda or mps")
    elif not available[name.split(":")[0]]:
        raise UserError(f"--device {name}: this machine has none; leave it at auto or use cpu")
    else:
        why = "asked for"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown --device {name}: a kind and perhaps a number, as in cuda:1") from error
    if device.type == "cuda":  # bfloat16, synchronize(), events and memory are asked of the current card
        index, cards = int(os.environ["LOCAL_RANK"]) if WORLD > 1 else device.index or 0, torch.cuda.device_count()
        if index >= cards:
            raise UserError(f"--device {name}: cuda:{index} is not there; this machine has cuda:0 to cuda:{cards - 1}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if WORLD > 1:
        if batch % WORLD:
            raise UserError(f"--batch {batch} is shared by {WORLD} processes: make it a multiple of {WORLD}")
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        why += f"; {WORLD} processes"
        if RANK:
            sys.stdout = sys.stderr = open(os.devnull, "w")
    if dtype == "auto":
        if device.type != "cuda":
            dtype, reason = "float32", f"the default on {device.type}"
        elif torch.cuda.is_bf16_supported(including_emulation=False):
            dtype, reason = "bfloat16", "mixed precision, this card has it"
        else:
            dtype, reason = "float16", "mixed precision with loss scaling, this card has no bfloat16"
    elif dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"unknown --dtype {dtype}: auto, float32, bfloat16 or float16")
    elif dtype == "float16" and device.type != "cuda":
        raise UserError(f"--dtype float16 needs loss scaling, which is for CUDA; on {device.type} use bfloat16 or float32")
    else:
        reason = "asked for"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    line = f"device {device} ({why}; {hardware}), dtype {dtype} ({reason})"
    return device, None if dtype == "float32" else getattr(torch, dtype), line


@contextlib.contextmanager
def rank_0_first():
    """Rank 0 first, then the others: around what may download a file."""
    if RANK:
        torch.distributed.barrier()
    yield
    if WORLD > 1 and RANK == 0:
        torch.distributed.barrier()


def generator(seed, purpose, step=0, device="cpu"):
    """A generator of its own for (seed, purpose, step): equal arguments, equal draws, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed} {purpose} {step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def environment(device):
    """Versions and hardware, for config.json."""
    try:
        git = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:  # there is no git here
        git = None
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "git": git and git.stdout.strip() or None, "platform": platform.platform(), "device": str(device),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads()}


# ------------------------------------------------------------------------------------- folders and checkpoints

def open_folder(out, resume, default, shard=""):
    """(folder, lock) of a command, locked against a second writer until the lock is dropped or the process ends.

    A folder that already holds a run is refused without --resume. With no --out, a new folder runs/<default>-<k>. The
    shards of one sweep share a folder and its lock; train() locks the runs below it one by one. Rank 0 chooses for all.
    """
    if RANK:
        chosen = [None]
        torch.distributed.broadcast_object_list(chosen)
        return chosen[0], contextlib.nullcontext()
    if out is None:
        taken = {path.name for path in pathlib.Path("runs").glob(f"{default}*")}
        out = pathlib.Path("runs") / next(name for k in range(1, len(taken) + 2) if (name := f"{default}-{k}") not in taken)
    if (out / "config.json").exists() and not (resume or shard):
        raise UserError(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
    if resume and not (out / "config.json").exists():
        print(f"{out} holds no run yet: starting from the beginning")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "a")
    lock_file(lock, out, shared=bool(shard))
    if WORLD > 1:
        torch.distributed.broadcast_object_list([out])
    return out, lock  # the caller keeps the lock alive


def lock_file(file, folder, shared=False, wait=False):
    """Lock an open file until it is closed or the process ends, however it ends. UserError when another has the lock."""
    try:
        import fcntl
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        file.close()
        raise UserError(f"another run is writing to {folder}: wait for it, or choose another --out") from error
    except (ImportError, OSError):
        pass  # Windows, and some network file systems, have no flock: two runs in one folder are not caught there


def write_config(out, args, device, **config):
    """config.json, what was asked for and where, once: --resume leaves the first. UserError when it is not a run's.
    Returns the command and config, for the summary."""
    path, config = out / "config.json", {"command": " ".join(["python", *(w for w in sys.argv if w != "--resume")]), **config}
    if not path.exists():
        write_json(path, {**config, "options": {k: str(v) for k, v in vars(args).items()},
                          "environment": environment(device)})
    elif not {"options", "environment"} <= set(read_json(path)):
        raise UserError(f"{path} is not a run's: it is kept; choose another --out")
    return config


def check_common(args):
    """UserError for what add_common's options can't say alone, before anything is written."""
    if len(set(args.arms)) < len(args.arms):
        raise UserError(f"--arms {' '.join(args.arms)}: name each once; --seeds repeats them")
    if args.dim % args.heads or args.dim // args.heads % 2:
        raise UserError(f"--dim {args.dim} must be --heads {args.heads} times an even head size, for RoPE's pairs")
    peak_lr(args, args.arms[0], None)  # a wrong number of them


def print_verdicts(verdicts, out):
    for verdict in verdicts:
        print(f"{verdict['verdict']:>13}: {verdict['claim']} ({verdict['measured']})")
    print(f"results in {out}")


def save_checkpoint(folder, state):
    """Atomically; the one before it stays as checkpoint.prev.pt, and the new one is read back before it takes over."""
    path, data = folder / "checkpoint.pt", io.BytesIO()
    torch.save(state, data)  # in memory: torch's own writer turns a full disk into a RuntimeError without a reason

    def keep(temporary):
        torch.load(temporary, map_location="cpu", weights_only=True)
        if path.exists():
            os.replace(path, folder / "checkpoint.prev.pt")
    write_atomic(path, data.getbuffer(), keep)


def load_checkpoint(folder, header):
    """The newest readable checkpoint of this header, None where there is none. Tensors, plain values; no code is run.

    A broken newest file falls back to the one before it and says so. UserError when none of them can be read, or when it
    was made with another header, naming the entry and the two values.
    """
    paths = [path for name in ("checkpoint.pt", "checkpoint.prev.pt") if (path := folder / name).exists()]
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found = state["header"]
        except Exception as error:  # whatever a damaged or foreign file makes the unpickler raise
            print(f"WARNING: {path} cannot be read ({type(error).__name__}): trying the one before it", file=sys.stderr)
            continue
        require_same(path, found, header)
        return state
    if paths:
        raise UserError(f"no checkpoint in {folder} can be read: move the folder away to train it again")
    return None


def require_same(path, found, header):
    """UserError at the first entry of header in which found, the header of the file at path, differs."""
    for key in header:
        if found.get(key) != header[key]:
            theirs, ours = repr(found.get(key)), repr(header[key])
            at = max(0, len(os.path.commonprefix((theirs, ours))) - 20)  # of a long vocabulary, where they differ
            raise UserError(f"{path} was made with {key} = {shorten(theirs, at)}, this run has {shorten(ours, at)}: use the "
                            "same settings, or another --out")


def shorten(text, at):
    return text if len(text) < 100 else "..." * (at > 0) + text[at:at + 60] + "..."


def bare(model):
    """The module inside torch.compile's and data parallel wrappers: a checkpoint names its parameters without them."""
    while inner := getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None):
        model = inner
    return model


# ------------------------------------------------------------------------------------------- progress and loop

class Progress:
    """Time left over all the steps of a command: a bar on a terminal, a plain line every 15 seconds elsewhere."""

    def __init__(self, total):
        from tqdm import tqdm
        self.total, self.done, self.free, self.began, self.printed = total, 0, 0, time.monotonic(), time.monotonic()
        self.bar = tqdm(total=total, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self, text, steps=1, free=False):
        """free: these steps took no time, they were done before."""
        self.done += steps
        self.free += steps * free
        if self.bar is not None:
            self.bar.set_description(text, refresh=False)
            self.bar.update(steps)
        elif time.monotonic() - self.printed > 15:
            self.printed = time.monotonic()
            left = (self.printed - self.began) * (self.total - self.done) / max(1, self.done - self.free)
            print(f"{text}  {self.done}/{self.total} steps, {left / 60:.1f} min left", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


class Diverged(ValueError):
    """A loss or gradient that is not finite: where it was seen."""


class Interrupts:
    """SIGINT sets a flag, and the loop stops between two steps; a second one during the save changes nothing."""

    def __enter__(self):
        self.stop = False
        try:
            self.before = signal.signal(signal.SIGINT, self.handle)
        except ValueError:  # not the main thread: Ctrl-C is someone else's there
            self.before = None
        return self

    def handle(self, *_):
        if not self.stop:
            print("\ninterrupted: saving a checkpoint", file=sys.stderr)
        self.stop = True

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


def make_optimizer(model, lr, device):
    """AdamW; weight decay on matrices alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=device.type in ("cpu", "cuda"))


def learning_rate(step, steps, peak, warmup):
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    return peak * min(1, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def first_bad(model, inputs, targets):
    """The layer where numbers stop being finite: in the first output, or on the way back, in the last gradient by order."""
    found = []

    def look(name):
        def hook(module, _, output):
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(x.isfinite().all() for x in tensors if torch.is_tensor(x)):
                found.append(f"first in the output of {name}")
        return hook
    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    model.zero_grad()  # clipping by a norm that is not finite has spoilt them all
    model(inputs, targets)[1].backward()
    for hook in hooks:
        hook.remove()
    found += [f"first in the gradient of {name}" for name, p in reversed(list(model.named_parameters()))
              if p.grad is not None and not p.grad.isfinite().all()]
    return found[0] if found else "in the loss alone"


def train(folder, model, batch, header, *, seed, steps, lr, device, dtype, evaluate, eval_every, every=None, compile=False,
          progress, label):
    """Train model for `steps`; returns the result, also left in folder/result.json, and skips what is done.

    batch(step) -> (inputs, targets); model(inputs, targets) -> (_, loss), the mean over the batch. evaluate(model) -> dict
    with val_loss, every eval_every steps and at the end, where a checkpoint is saved too. every(step, inputs) -> dict or None
    runs before each step, outside autograd and compilation, and what it returns is logged. header: plain values that a
    checkpoint must share with the run that resumes it.
    On a CPU a stopped and resumed run is bit-equal to an unbroken one. Diverged runs end with diverged = True.
    Under torchrun each rank takes its slice of the same batches, so that the losses, and the checkpoints, are those of one
    process; every() sees the whole batch; dropout and token noise differ between ranks. Other ranks than 0 get None.
    """
    result_path, log_path = folder / "result.json", folder / "metrics.jsonl"
    header = {"format": FORMAT, "seed": seed, "steps": steps, "lr": lr, "weight_decay": WEIGHT_DECAY,
              "dtype": str(dtype), **header}
    warmup = max(1, min(100, steps // 5))
    with contextlib.ExitStack() as stack:  # the log, with its lock, and the interrupts end with it
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(open(os.devnull if RANK else log_path, "ab", buffering=0))
        if RANK == 0:
            lock_file(log, folder)
            for stale in folder.glob("*.tmp"):  # of a process that was killed while it wrote
                stale.unlink()
        saved = load_checkpoint(folder, header)
        result = read_json(result_path) if result_path.exists() else None
        if result is not None:
            require_same(result_path, result["header"], header)
        forward, model = model.to(device), bare(model)
        for module in model.modules():
            if WORLD > 1 and hasattr(module, "token_seed"):  # of noise_block.py
                module.token_seed = RANK  # its shared A stays the same on all ranks
                module.check = False  # one rank that stops alone leaves the others waiting: all see the loss in flush()
        if saved is not None:
            model.load_state_dict(saved["model"])
        # a result without its model, or with a broken last checkpoint, is trained for again
        if result is not None and (result["diverged"] or saved is not None and saved["step"] == steps):
            progress.advance(f"{label}: done before", steps, free=True)
            return None if RANK else result
        optimizer = make_optimizer(model, lr, device)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        begin, evaluations, log_bytes = 0, [], 0
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
            begin, evaluations, log_bytes = saved["step"], saved["evaluations"], saved["log_bytes"]
            progress.advance(label, begin, free=True)
        forward = torch.compile(forward) if compile else forward
        if WORLD > 1:
            forward = torch.nn.parallel.DistributedDataParallel(forward)
        pending, seconds, diverged = [], 0.0, None  # pending: losses stay on the device until they are written

        def flush():
            """Pending steps into the log; Diverged at the first that is not finite."""
            if not pending:
                return
            values = torch.stack([torch.stack((loss, norm)) for _, loss, norm, _ in pending])
            if WORLD > 1:
                torch.distributed.all_reduce(values)
                values /= WORLD  # the mean of equal parts of the batch; the norm is the same on all ranks
            values = values.tolist()
            rows = [{"step": at, "loss": loss, "grad_norm": norm, **(extra or {})}
                    for (at, _, _, extra), (loss, norm) in zip(pending, values)]
            pending.clear()
            write_all(log, "".join(json.dumps(finite(row)) + "\n" for row in rows).encode(), log_path)
            for row in rows:
                if not math.isfinite(row["loss"]) or not (math.isfinite(row["grad_norm"]) or scaler.is_enabled()):
                    late = f"seen {step - row['step']} steps later: the layer is not known"  # on a GPU; on a CPU at once
                    with torch.autocast(device.type, dtype, enabled=dtype is not None):
                        where = first_bad(model, inputs, targets) if step == row["step"] else late
                    raise Diverged(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}, {where}")

        def interrupted():
            """Whether any rank was; on this they must agree."""
            if WORLD == 1:
                return interrupts.stop
            flag = torch.tensor(float(interrupts.stop), device=device)
            torch.distributed.all_reduce(flag)
            return flag.item() > 0

        def save(at):
            if RANK:
                return
            with writing(log_path):
                os.fsync(log.fileno())
            save_checkpoint(folder, {"header": header, "step": at, "evaluations": evaluations, "model": model.state_dict(),
                                     "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                                     "log_bytes": log.tell()})

        def look(at):
            found = [None]
            if RANK == 0:
                model.eval()
                with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
                    found = [{"step": at, **evaluate(model)}]
                model.train()
            if WORLD > 1:
                torch.distributed.broadcast_object_list(found)
            evaluations.extend(found)
            if not math.isfinite(evaluations[-1]["val_loss"]):
                raise Diverged(f"step {at}: validation loss {evaluations[-1]['val_loss']}")

        if RANK == 0 and log.tell() < log_bytes:
            raise UserError(f"{log_path} is shorter than when the checkpoint beside it was saved: its lines are lost; move "
                            f"{folder} away to train it again")
        interrupts = stack.enter_context(Interrupts())
        if RANK == 0:
            with writing(log_path):
                log.truncate(log_bytes)  # what was logged after the checkpoint is logged again
        step = begin
        try:
            if begin == 0:
                look(0)
            for step in range(begin, steps):
                started = time.perf_counter()
                inputs, targets = batch(step)
                extra = every(step, inputs) if every else None
                torch.manual_seed(generator(seed, "dropout" + RANK * f" {RANK}", step).initial_seed())
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, lr, warmup)
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    _, loss = forward(*(part.tensor_split(WORLD)[RANK] for part in (inputs, targets)))
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                pending.append((step, loss.detach(), norm, extra))
                due = step + 1 == steps or (step + 1) % eval_every == 0
                if device.type == "cpu" or due or len(pending) == 20:  # on a GPU, one synchronisation in 20 steps
                    flush()
                scaler.step(optimizer)
                scaler.update()
                seconds += time.perf_counter() - started
                progress.advance(label)
                stop = (due or WORLD == 1 or step % 20 == 0) and interrupted()
                if due or stop:
                    flush()
                    if due:
                        look(step + 1)
                    save(step + 1)
                if stop or due and interrupted():
                    raise KeyboardInterrupt(f"interrupted at step {step + 1} of {label}: go on with the same command and "
                                            f"--resume --out {folder.parent}")
        except ValueError as error:  # also of the noise, which refuses tokens that are not finite
            if "not finite" not in str(error) and not isinstance(error, Diverged):
                raise
            diverged = str(error) if isinstance(error, Diverged) else f"step {step}: {error}"
            print(f"{label} diverged at {diverged}; the last good checkpoint is kept", file=sys.stderr)
            progress.advance(label, steps - step, free=True)
    if RANK:
        return None
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    losses = [row["loss"] for row in rows] or [None]
    best = min(((each["val_loss"], each["step"]) for each in evaluations if math.isfinite(each["val_loss"])), default=None)
    result = {"header": header, "diverged": diverged is not None, "diverged_at": diverged, "steps": steps,
              "train_loss_first": losses[0], "train_loss_last": losses[-1],
              "best": best and {"val_loss": best[0], "step": best[1]},
              "grad_norms": [row["grad_norm"] for row in rows], "evaluations": evaluations}
    if seconds:  # else the run was stopped between its last checkpoint and this line: its time is not known
        write_json(folder / "timing.json", {"steps": steps - begin, "seconds_per_step": seconds / (steps - begin)})
    write_json(result_path, result)
    return finite(result)


def read_json(path):
    try:
        return json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): move it away, and --resume makes it again") from error


def table(rows, columns):
    """rows (dicts) as aligned text; columns: {key: (heading, format)}. A missing or null value is '-'."""
    lines = [[heading for heading, _ in columns.values()]]
    for row in rows:
        lines.append(["-" if row.get(key) is None else format(row[key], spec) for key, (_, spec) in columns.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def figure_axes(columns, height=3.4, dpi=110):
    """A matplotlib figure and its axes; save_figure draws it without a display."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4.2 * columns, height), dpi=dpi, layout="constrained")
    return figure, figure.subplots(1, columns)


def save_figure(figure, path):
    """As PNG, atomically."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_atomic(path, data.getbuffer())
