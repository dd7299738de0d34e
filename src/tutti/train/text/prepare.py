"""Make the tokenizer and packed tokens of a folder of files, each cached."""

import fcntl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tutti.data.packing import Packed, pack
from tutti.data.text_folder import Corpus, Document, read_corpus
from tutti.data.tokenizer import load_tokenizer, train_tokenizer
from tutti.train.text.config import Config
from tutti.train.text.progress import Display, Stage
from tutti.whole_files import whole_folder


@dataclass(frozen=True)
class Prepared:
    """The input of training: the tokenizer's folder and size, and the packed training and held-out tokens."""

    tokenizer: Path
    vocab_size: int
    train: Packed
    held_out: Packed

    @property
    def key(self) -> str:
        """A key of all tokens."""
        return self.train.path.parent.name


def prepare(config: Config, display: Display) -> Prepared:
    """Read, tokenize and pack, or use the cache of an earlier run on the same text.

    Of several processes with the same text, one does it and the others wait.
    """
    cache = Path(config.data.cache)
    if config.data.source.endswith((".toml", ".yaml")):
        return _of_corpus(config, cache, display)
    with display.stage("read") as stage:
        corpus = read_corpus(config.data.source, config.data.patterns, config.data.held_out, stage.update)
        stage.result(corpus.summary())
    with _one_at_a_time(cache):
        with display.stage("tokenizer") as stage:
            folder = _tokenizer(config, corpus, cache, stage)
        with display.stage("tokenize") as stage:
            return _pack(folder, corpus, cache, stage)


def _tokenizer(config: Config, corpus: Corpus, cache: Path, stage: Stage) -> Path:
    sample = _first(corpus.train, config.tokenizer.sample_mb * 1e6)
    key = _key([d.digest for d in sample], config.tokenizer.vocab_size)
    folder = cache / f"tokenizer-{key}"
    size = sum(d.size for d in sample)
    if not folder.exists():
        with whole_folder(folder) as draft:
            train_tokenizer(_counted(sample, size, stage), config.tokenizer.vocab_size).save_pretrained(draft)
    stage.result(f"{config.tokenizer.vocab_size} tokens, learned from {size / 1e6:.1f} MB")
    return folder


def _pack(folder: Path, corpus: Corpus, cache: Path, stage: Stage) -> Prepared:
    tokenizer = load_tokenizer(folder)
    packed = cache / f"tokens-{_key(corpus.key, folder.name)}"
    train = pack(packed, "train", tokenizer, corpus.train, stage.update)
    held_out = pack(packed, "held_out", tokenizer, corpus.held_out)
    return _prepared(folder, train, held_out, stage)


def _of_corpus(config: Config, cache: Path, display: Display) -> Prepared:
    """The tokens of the corpus that `tutti corpus run` prepares from a config."""
    from tutti.data.corpus.pool import Processes
    from tutti.data.corpus.tokens import learn_tokenizer, tokenize, tokens_key
    from tutti.launch.launch import cores
    from tutti.train.corpus import load_pipeline

    with closing(Processes(cores())) as pool, _one_at_a_time(cache):
        with display.stage("corpus") as stage:
            corpus = load_pipeline(Path(config.data.source)).run(pool=pool, show=stage.phase)
            read, size = corpus.accounts[0].documents_in, corpus.manifest["bytes"]
            stage.result(f"{corpus.documents} documents of {read}, {size / 1e6:.1f} MB; {corpus.folder}/report.html")
        with display.stage("tokenizer") as stage:
            megabytes = config.tokenizer.sample_mb
            folder = cache / f"tokenizer-{_key(corpus.key, megabytes, config.tokenizer.vocab_size)}"
            if not folder.exists():
                learn_tokenizer(corpus, config.tokenizer.vocab_size, megabytes * 1e6, folder)
            stage.result(f"{config.tokenizer.vocab_size} tokens, learned from at most {megabytes:.1f} MB")
        with display.stage("tokenize") as stage:
            tokens = cache / f"tokens-{tokens_key(corpus, folder, config.data.held_out)}"
            packed = tokenize(corpus, folder, tokens, config.data.held_out, pool, stage.phase)
            return _prepared(folder, packed["train"], packed["held_out"], stage)


def _prepared(tokenizer: Path, train: Packed, held_out: Packed, stage: Stage) -> Prepared:
    counts = f"{train.tokens / 1e6:.2f} M tokens to train on, {held_out.tokens / 1e6:.2f} M held out"
    stage.result(f"{counts}; {train.text_bytes / max(train.tokens, 1):.2f} bytes a token")
    return Prepared(tokenizer, len(load_tokenizer(tokenizer)), train, held_out)


def _first(documents: tuple[Document, ...], size: float) -> list[Document]:
    """Documents in the order of their hashes, effectively random, up to `size` bytes; at least one."""
    chosen, total = [], 0
    for d in sorted(documents, key=lambda d: d.digest):
        if chosen and total + d.size > size:
            break
        chosen.append(d)
        total += d.size
    return chosen


def _counted(documents: list[Document], size: int, stage: Stage) -> Iterator[str]:
    done = 0
    for d in documents:
        yield d.read()
        done += d.size
        stage.update(done, size)


def _key(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
