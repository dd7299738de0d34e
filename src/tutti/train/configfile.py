"""The config of `tutti train`: a file, and a command line over it, `--optimizer.lr 3e-4`."""

from pathlib import Path

from tutti.config.build import build, check_table, keys
from tutti.config.files import read, with_options
from tutti.train.taskrun import TaskRun
from tutti.train.text.config import Config, check
from tutti.train.values import NamedValues


def parse(args: list[str]) -> Config | TaskRun:
    """The config of `tutti train [FILE.toml] [--section.key value ...]`: a `TaskRun` if the file names a task.

    SystemExit 2 for a bad option of a `Config`; ValueError for whatever else is wrong.
    """
    import tyro

    file, options = (Path(args[0]), args[1:]) if args and not args[0].startswith("-") else (None, args)
    if file and "task" in (table := read(file)):
        if "--help" in options or "-h" in options:
            print("\n".join([f"tutti train {file} [--section.key value ...]", *keys(TaskRun)]))
            raise SystemExit(0)
        return check_table(TaskRun, with_options(table, options), str(file))
    config = tyro.cli(
        Config,
        prog=f"tutti train {file or '[FILE.toml]'}",
        args=options,
        default=load(file) if file else Config(),
        config=(tyro.conf.FlagConversionOff,),
    )
    check(config)
    return config


def load(file: Path) -> Config:
    """Read a TOML or YAML file. A ValueError names the file, the key, and what is expected."""
    return from_table(read(file), str(file))


def from_table(table: NamedValues, file: str) -> Config:
    """A config from nested tables of TOML or JSON. Errors name the `file`."""
    return build(Config, table, file)
