"""Personal data and secrets as they stand in text, all invented, and what only looks like them.

Formats are the published ones: RFC 5322 and 4291, E.164, ISO 7812 (with Luhn's digit), ISO 13616, the providers' own
prefixes of keys. Telephone numbers lie in the ranges that are reserved for fiction where a country has one.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable

NAMES = ("anna", "berta.klein", "carlos", "dmitri", "eve", "fatima.z", "grace_hopper", "hans-peter", "ines", "jun")
HOSTS = ("example.com", "mail.example.org", "uni-example.de", "corp.example.co.uk", "example.io")
SENTENCES = ("For questions about this part, write to {} before the end of the month.",
             "The entry that was found in the log of that day is {} and nothing else.",
             "As noted above, {} is what they have been given for the test.",
             "The value {} was copied from the message to the team.")  # fmt: skip
_ALPHABET = string.ascii_letters + string.digits


def _drawn(rng: random.Random, count: int, alphabet: str = _ALPHABET) -> str:
    return "".join(rng.choices(alphabet, k=count))


def _email(rng: random.Random) -> str:
    return f"{rng.choice(NAMES)}{rng.choice(['', '+news', str(rng.randrange(10, 99))])}@{rng.choice(HOSTS)}"


def _ipv4(rng: random.Random) -> str:
    first = rng.choice([5, 8, 23, 45, 62, 80, 93, 104, 151, 185, 212])
    return f"{first}." + ".".join(str(rng.randrange(1, 255)) for _ in range(3))


def _ipv4_private(rng: random.Random) -> str:
    last = f"{rng.randrange(256)}.{rng.randrange(1, 255)}"
    return rng.choice(["10.{}." + last, "192.168." + last, "172.16." + last, "127.0.0.1"]).format(rng.randrange(256))


def _ipv6(rng: random.Random) -> str:
    groups = [f"{rng.randrange(1, 65536):x}" for _ in range(6)]
    short, long = f"2a0{rng.randrange(10)}:{groups[0]}::{groups[1]}", ":".join(["2606", "4700", *groups])
    return short if rng.random() < 0.5 else long


def _ipv6_private(rng: random.Random) -> str:
    return rng.choice(["::1", f"fe80::{rng.randrange(1, 65536):x}", f"fd00:{rng.randrange(1, 65536):x}::1"])


def _phone_us(rng: random.Random) -> str:
    area, line = rng.choice([212, 312, 415, 617, 702]), f"01{rng.randrange(10, 100)}"
    return rng.choice(["({}) 555-{}", "{}-555-{}", "{}.555.{}", "+1 {} 555 {}", "+1-{}-555-{}"]).format(area, line)


def _phone(rng: random.Random) -> str:
    digits = _drawn(rng, 4, string.digits)
    forms = ("+44 20 7946 0{}", "+49 30 23125 {}", "+33 1 99 00 {}", "+61 2 5550 {}", "+4930231{}", "020 7946 {}")
    last = digits[:3] if (form := rng.choice(forms)) == forms[0] else digits
    return form.format(f"{digits[:2]} {digits[2:]}" if form == forms[2] else last)


def _check(digits: str) -> int:
    """Luhn's last digit."""
    doubled = [int(x) * (2 if i % 2 == 0 else 1) for i, x in enumerate(reversed(digits))]
    return -sum(x - 9 if x > 9 else x for x in doubled) % 10


def _card(rng: random.Random) -> str:
    digits = rng.choice(["4", "51", "55"])
    digits += _drawn(rng, 15 - len(digits), string.digits)
    digits += str(_check(digits))
    return rng.choice(["", " ", "-"]).join(digits[i : i + 4] for i in range(0, 16, 4))


def _iban(rng: random.Random) -> str:
    bank = _drawn(rng, 18, string.digits)
    return f"DE{98 - int(bank + '131400') % 97:02d}{bank}"


def _ssn(rng: random.Random) -> str:
    return f"{rng.randrange(100, 650)}-{rng.randrange(10, 99)}-{rng.randrange(1000, 9999)}"


def _token(rng: random.Random) -> str:
    """A JSON web token: two objects and a signature."""
    parts = ['{"alg":"HS256","typ":"JWT"}', f'{{"sub":"{_drawn(rng, 12)}"}}', _drawn(rng, 32)]
    return ".".join(base64.urlsafe_b64encode(x.encode()).decode().rstrip("=") for x in parts)


def _private_key(rng: random.Random) -> str:
    kind = rng.choice(["RSA ", "EC ", "OPENSSH ", ""])
    body = "\n".join(_drawn(rng, 64, _ALPHABET + "+/") for _ in range(8))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


def _key(prefix: str, count: int, alphabet: str = _ALPHABET) -> Callable[[random.Random], str]:
    return lambda rng: prefix + _drawn(rng, count, alphabet)


PRIVATE: dict[str, Callable[[random.Random], str]] = {
    "email": _email, "ipv4": _ipv4, "ipv4_private": _ipv4_private, "ipv6": _ipv6, "ipv6_private": _ipv6_private,
    "phone_us": _phone_us, "phone": _phone, "card": _card, "iban": _iban, "ssn": _ssn, "private_key": _private_key,
    "jwt": _token, "key_aws": _key("AKIA", 16, string.ascii_uppercase + "234567"), "key_github": _key("ghp_", 36),
    "key_google": _key("AIza", 35), "key_openai": _key("sk-proj-", 48), "key_stripe": _key("sk_live_", 24),
    "key_huggingface": _key("hf_", 34, string.ascii_letters), "key_gitlab": _key("glpat-", 20),
    "key_slack": lambda rng: "-".join(["xoxb", _drawn(rng, 12, string.digits), _drawn(rng, 12, string.digits),
                                       _drawn(rng, 24)]),
}  # fmt: skip


def _not_a_card(rng: random.Random) -> str:
    digits = "4" + _drawn(rng, 14, string.digits)
    return digits + str((_check(digits) + rng.randrange(1, 10)) % 10)


LOOKALIKES: dict[str, Callable[[random.Random], str]] = {
    "version": lambda rng: "version " + ".".join(str(rng.randrange(1, 20)) for _ in range(5)),
    "time": lambda rng: f"{rng.randrange(10, 24)}:{rng.randrange(10, 60)}:{rng.randrange(10, 60)}",
    "date": lambda rng: f"{rng.randrange(1990, 2027)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
    "isbn": lambda rng: f"ISBN 978-3-16-{_drawn(rng, 6, string.digits)}-{rng.randrange(10)}",
    "doi": lambda rng: f"doi:10.{rng.randrange(1000, 9999)}/{_drawn(rng, 1, string.digits)}.{rng.randrange(10**6)}",
    "spelled email": lambda rng: f"{rng.choice(NAMES)} at example dot com",
    "handle": lambda rng: f"@{rng.choice(NAMES)}", "no domain": lambda rng: f"{rng.choice(NAMES)}@localhost",
    "not an address": lambda rng: f"{rng.randrange(300, 999)}.{rng.randrange(300, 999)}.1.2",
    "scope": lambda rng: f"std::{rng.choice(['vector', 'map', 'string'])}", "not a card": _not_a_card,
    "number": lambda rng: f"{rng.randrange(10**6)}.{rng.randrange(10**9)}",
    "hash": lambda rng: _drawn(rng, 40, "0123456789abcdef"),
    "years": lambda rng: f"{(y := rng.randrange(1900, 2000))}-{y + rng.randrange(1, 20)}",
    "decorator": lambda rng: "@functools.cache", "short key": lambda rng: "sk-" + _drawn(rng, 4),
}  # fmt: skip


def sentence(value: str, rng: random.Random) -> str:
    return rng.choice(SENTENCES).format(value)
