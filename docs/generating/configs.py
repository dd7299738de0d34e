"""Every key of the config files: its type, and its value where the file leaves it out."""

from __future__ import annotations

from generating.page import NOTE, escaped, table


def page() -> str:
    from tutti.align.command import AlignRun
    from tutti.config.build import rows
    from tutti.rl.run import RunConfig
    from tutti.science.em.mt.config import MTConfig
    from tutti.science.mol.config import MDConfig
    from tutti.science.peptides.config import PeptidesConfig
    from tutti.train.taskrun import TaskRun
    from tutti.train.text.config import Config

    configs = {
        "tutti train": (
            "A run on text. Options of the command line have the same names: `--optimizer.lr 3e-4`.",
            Config,
        ),
        "tutti train, with a task": ("A config that names a `task` trains on rows of any kind.", TaskRun),
        "tutti align": ("`rewards` is a list of tables, `[[rewards]]`.", AlignRun),
        "tutti rl train": ("`options` are those of the algorithm.", RunConfig),
        "tutti md": ("Molecular dynamics.", MDConfig),
        "tutti mt": ("Magnetotellurics.", MTConfig),
        "tutti peptides": ("Design of peptides.", PeptidesConfig),
    }
    text = [
        f"{NOTE}\n# Config files\n\nFiles are TOML or YAML. Tables are sections: `[optimizer] lr = 3e-4` is the key "
        '`optimizer.lr`. `include = "base.toml"` merges other files first. An unknown key is an error that names the '
        "nearest one. `[]` marks sections that may be repeated.\n"
    ]
    for verb, (about, kind) in configs.items():
        lines = [(f"`{name}`", escaped(what), f"`{default}`" if default else "", meaning.replace("|", "\\|"))
                 for name, what, default, meaning in rows(kind)]  # fmt: skip
        text.append(f"\n## {verb}\n\n{about}\n\n" + table(("key", "value", "without it", "meaning"), lines))
    return "".join(text)
