"""Personal data and keys: found and masked."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome, replace, texts
from tutti.data.corpus.steps.mask import Kind, masked
from tutti.data.corpus.steps.secrets import KEYS
from tutti.data.corpus.steps.step import Step


def _is_email(text: str) -> bool:
    name, _, host = text.rpartition("@")
    return len(name) <= 64 and ".." not in text and not host.rpartition(".")[2].isdigit()


def _is_public(text: str) -> bool:
    """Whether an address is one of the open internet: others name no person. Of version 6, those in use (2000::/3)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and (address.version == 4 or address.packed[0] >> 5 == 1)


def _is_phone(text: str) -> bool:
    """7 to 15 digits (ITU-T E.164), not a date, not a range of years, no ISBN."""
    digits = re.sub(r"\D", "", text)
    dated = re.match(r"(\d{4}[-./ ]\d{1,2}[-./ ]\d{1,2}|\d{1,2}[-./]\d{1,2}[-./](19|20)?\d{2})(?!\d)", text)
    isbn = len(digits) == 13 and digits.startswith(("978", "979"))
    return 7 <= len(digits) <= 15 and not dated and not isbn


def is_card(text: str) -> bool:
    """Whether digits end in the check digit of payment cards (Luhn, ISO/IEC 7812)."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = [d * 2 - 9 if d > 4 else d * 2 for d in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Whether an account number passes the check of ISO 13616."""
    letters = text.replace(" ", "").upper()
    moved = letters[4:] + letters[:4]
    return 15 <= len(letters) <= 34 and int("".join(str(int(c, 36)) for c in moved)) % 97 == 1


def _is_ssn(text: str) -> bool:
    """Whether a social security number of the United States may have been given out (SSA, rules since 2011)."""
    area, group, serial = text.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


_EDGE = r"(?<![\w.+@/:-])(?<!\d )"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_HEX = r"[0-9A-Fa-f]{1,4}"
KINDS: dict[str, Kind] = {
    "email": Kind(
        "<EMAIL>", "@[A-Za-z0-9]",
        re.compile(
            r"(?<![\w.+%'-])[\w.+%'-]*[\w%+-]@"
            r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,24}(?![\w@-])"
        ),
        _is_email,
    ),
    "ip": Kind(
        "<IP>", r"\d\.\d+\.\d+\.\d|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f]",
        re.compile(
            rf"(?<![\w.:-])(?:(?:{_OCTET}\.){{3}}{_OCTET}|(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:)+(?::{_HEX})+|(?:{_HEX}:)+:"
            rf"|::(?:{_HEX}:)*{_HEX})(?![\w:]|\.\d)"
        ),
        _is_public,
    ),
    "iban": Kind(
        "<ACCOUNT>", r"[A-Z]{2}\d{2} ?[A-Z0-9]{4}",
        re.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)"), is_iban,
    ),
    "ssn": Kind(
        "<ID>", r"\d{3}-\d{2}-\d{4}", re.compile(r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-]|\.\d)"), _is_ssn,
    ),
    "card": Kind(
        "<CARD>", r"\d{4}[ -]?\d{4,6}[ -]?\d{4,5}",
        re.compile(r"(?<![\w.-])\d{4}(?:[ -]?\d{4,6}){2}(?:[ -]?\d{1,4})?(?![\w-]|\.\d)"), is_card,
    ),
    "phone": Kind(
        "<PHONE>", r"\+\d|\(\d{2,5}\) ?\d|\d{3}[ .-]\d{3,4}|\b0\d{1,4}[ /-]\d{2}|\b00[1-9]",
        re.compile(
            _EDGE + r"(?:"
            r"(?:\+[1-9]\d{0,2}|00(?:1|7|[2-9]\d{1,2})(?=[ .-]))(?:[ .-]?\(?\d{1,4}\)?){2,5}"  # international
            r"|(?:1[ .-])?\(\d{3}\) ?\d{3}[ .-]?\d{4}|(?:1[ .-])?[2-9]\d{2}[ .-][2-9]\d{2}[ .-]\d{4}"  # North America
            r"|\(0\d{1,4}\)(?:[ -]?\d{2,4}){2,4}|0[1-9]\d{0,3}[ /-]\d{2,4}(?:[ -]?\d{2,4}){1,3}"  # with a trunk prefix
            r")(?![\w/@:-]|\.\d| \d)"
        ),
        _is_phone,
    ),
}  # fmt: skip
"""Kinds of personal data, in the order in which they are looked for."""


@dataclass(frozen=True)
class MaskPii(Step):
    """Replace personal data by the names of their kinds: `<EMAIL>`, `<IP>`, `<PHONE>`, `<CARD>`, `<ACCOUNT>`, `<ID>`,
    `<KEY>`.

    IP addresses are masked if they are public; card and account numbers if their check digits are right; keys are
    those of secrets.py. kinds: key, email, ip, iban, ssn (of the United States), card, phone.
    """

    kind: ClassVar[str] = "mask_pii"
    kinds: tuple[str, ...] = ("key", "email", "ip", "iban", "ssn", "card", "phone")

    def __post_init__(self):
        if unknown := set(self.kinds) - set(KINDS) - {"key"}:
            raise ValueError(f"mask_pii: no kind {', '.join(sorted(unknown))}; give some of key, {', '.join(KINDS)}")

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        documents = texts(batch)
        cut: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in self.kinds:
            for kind in KEYS if name == "key" else (KINDS[name],):
                documents, count, size = masked(documents, kind)
                before = cut.get(name, (0, 0))
                cut[name] = (before[0] + count, before[1] + size)
        return Outcome(replace(batch, "text", documents), None, None, cut)
