"""How Minari's formats store episodes: a folder with a table for each in Arrow and Parquet, one file in HDF5.

Tables have T + 1 rows for T steps. In the last row, all columns but the observations are zero.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tutti.rl.adapt.packages import package

STEPWISE = ("rewards", "terminations", "truncations")


@dataclass(frozen=True)
class Format:
    """write(folder, episodes, observation space, action space, seeds). read(folder, number of episodes, observation
    space, action space, whether images are JPEG)."""

    write: Callable[[Path, list[dict[str, Any]], spaces.Space, spaces.Space, list[int | None]], None]
    read: Callable[[Path, int, spaces.Space, spaces.Space, bool], Iterator[dict[str, Any]]]


def is_image(space: spaces.Space) -> bool:
    """Whether Minari would store values of this space as JPEG."""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) in (2, 3)
        and min(space.shape[:2]) >= 32
        and space.dtype == np.uint8
        and not space.low.any()
        and bool((space.high == 255).all())
    )


def write_tables(
    folder: Path, episodes: list[dict[str, Any]], observed: spaces.Space, acted: spaces.Space, seeds: list, end: str
) -> None:
    pa: Any = package("pyarrow")
    for i, (episode, seed) in enumerate(zip(episodes, seeds, strict=True)):
        columns = {
            "observations": _column(observed, episode["observations"], 0),
            "actions": _column(acted, episode["actions"], 1),
            **{name: pa.array(np.pad(episode[name], (0, 1))) for name in STEPWISE},
        }
        place = folder / str(i)
        place.mkdir()
        _write_table(place / f"part-0.{end}", pa.table(columns))
        about = {"id": i, "total_steps": len(episode["rewards"])} | ({} if seed is None else {"seed": seed})
        (place / "metadata.json").write_text(json.dumps(about))


def read_tables(
    folder: Path, n: int, observed: spaces.Space, acted: spaces.Space, jpeg: bool, end: str
) -> Iterator[dict[str, Any]]:
    pa: Any = package("pyarrow")
    for i in range(n):
        place = folder / str(i)
        parts = sorted(path for path in place.iterdir() if path.suffix == f".{end}")
        table = pa.concat_tables([_read_table(path) for path in parts]).combine_chunks()
        column = {name: table.column(name).combine_chunks() for name in ("observations", "actions", *STEPWISE)}
        yield {
            "observations": _values(observed, column["observations"], jpeg),
            "actions": _values(acted, column["actions"].slice(0, len(table) - 1), jpeg),
            **{name: column[name].to_numpy(zero_copy_only=False)[:-1] for name in STEPWISE},
            "seed": json.loads((place / "metadata.json").read_text()).get("seed"),
        }


def _write_table(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        package("pyarrow.parquet").write_table(table, path, row_group_size=max(len(table), 1))
        return
    with package("pyarrow.ipc").new_file(str(path), table.schema) as file:
        file.write_table(table)


def _read_table(path: Path) -> Any:
    if path.suffix == ".parquet":
        return package("pyarrow.parquet").read_table(path, partitioning=None)
    return package("pyarrow.ipc").open_file(str(path)).read_all()


def _column(space: spaces.Space, values: Any, more: int) -> Any:
    """Values as an array of Arrow, with `more` zeros at the end."""
    pa: Any = package("pyarrow")
    match space:
        case spaces.Dict():
            names = list(space.spaces)
            return pa.StructArray.from_arrays([_column(space[name], values[name], more) for name in names], names=names)
        case spaces.Tuple():
            parts = [_column(part, x, more) for part, x in zip(space.spaces, values, strict=True)]
            return pa.StructArray.from_arrays(parts, names=[str(i) for i in range(len(parts))])
    kind = pa.from_numpy_dtype(space.dtype)
    flat = np.pad(values.reshape(len(values), -1), ((0, more), (0, 0)))
    if isinstance(space, spaces.Discrete):
        return pa.array(flat[:, 0], type=kind)
    return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), type=pa.list_(kind, flat.shape[1]))


def _values(space: spaces.Space, column: Any, jpeg: bool) -> Any:
    match space:
        case spaces.Dict():
            return {name: _values(part, column.field(name), jpeg) for name, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_values(part, column.field(str(i)), jpeg) for i, part in enumerate(space.spaces))
        case spaces.Discrete():
            return column.to_numpy(zero_copy_only=False)
    if jpeg and is_image(space):
        return _pictures([x.as_py() for x in column])
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), *(space.shape or ()))


def write_hdf5(
    folder: Path, episodes: list[dict[str, Any]], observed: spaces.Space, acted: spaces.Space, seeds: list
) -> None:
    with package("h5py").File(folder / "main_data.hdf5", "w", track_order=True) as file:
        for i, (episode, seed) in enumerate(zip(episodes, seeds, strict=True)):
            group = file.create_group(f"episode_{i}")
            group.attrs.update({"id": i, "total_steps": len(episode["rewards"])})
            if seed is not None:
                group.attrs["seed"] = seed
            for name in ("observations", "actions", *STEPWISE):
                _put(group, name, episode[name])


def read_hdf5(
    folder: Path, n: int, observed: spaces.Space, acted: spaces.Space, jpeg: bool
) -> Iterator[dict[str, Any]]:
    with package("h5py").File(folder / "main_data.hdf5", "r") as file:
        for i in range(n):
            group = file[f"episode_{i}"]
            seed = group.attrs.get("seed")
            yield {
                "observations": _get(group["observations"], observed, jpeg),
                "actions": _get(group["actions"], acted, jpeg),
                **{name: group[name][()] for name in STEPWISE},
                "seed": None if seed is None else int(seed),
            }


def _put(group: Any, name: str, value: Any) -> None:
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else ((f"_index_{i}", x) for i, x in enumerate(value))
        inner = group.create_group(name)
        for key, x in items:
            _put(inner, key, x)
        return
    group.create_dataset(name, data=value, chunks=True, maxshape=(None, *value.shape[1:]))


def _get(group: Any, space: spaces.Space, jpeg: bool) -> Any:
    match space:
        case spaces.Dict():
            return {name: _get(group[name], part, jpeg) for name, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_get(group[f"_index_{i}"], part, jpeg) for i, part in enumerate(space.spaces))
    return _pictures([bytes(x) for x in group[()]]) if jpeg and is_image(space) else group[()]


def _pictures(images: list[bytes]) -> np.ndarray:
    image: Any = package("PIL.Image")
    return np.stack([np.array(image.open(io.BytesIO(x))) for x in images])


def _tables(end: str) -> Format:
    return Format(partial(write_tables, end=end), partial(read_tables, end=end))


FORMATS = {"arrow": _tables("arrow"), "parquet": _tables("parquet"), "hdf5": Format(write_hdf5, read_hdf5)}
