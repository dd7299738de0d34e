"""Config files of all verbs: TOML or YAML tables, options over them, and the dataclasses that they fill.

`tyro` reads command lines. Tables are read here, because an error names the file, the key and the nearest key:
`pydantic` and `cattrs` name neither file nor nearest key, and `msgspec` ignores unknown keys of dataclasses.
"""
