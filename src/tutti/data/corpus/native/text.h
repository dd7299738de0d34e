// Words, lines and paragraphs of UTF-8 text, and their hashes. The other files of this folder share it.
//
// A batch of documents is an Arrow string array: `offsets` has n + 1 entries, document i is bytes
// [offsets[i], offsets[i + 1]) of `data`. Arrow has checked that it is valid UTF-8.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

// Classes of code points; tables.py computes them from Python's unicodedata.
enum : u8 { SPACE = 1, ALPHA = 2, DIGIT = 4, PUNCTUATION = 8, IDEOGRAPH = 16, UPPER = 32 };

u8* classes = nullptr;
u32* lower_of = nullptr;
u32 table_size = 0;

u8 class_of(u32 c) { return c < table_size ? classes[c] : ALPHA | IDEOGRAPH; }
u32 lower(u32 c) { return c < table_size ? lower_of[c] : c; }

u32 decode(const u8*& p, const u8* end) {
  u32 c = *p++;
  if (c < 0x80) return c;
  int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1;
  c &= 0x3F >> more;
  for (; more && p < end; --more) c = c << 6 | (*p++ & 0x3F);
  return c;
}

u64 rotate(u64 x, int bits) { return x << bits | x >> (64 - bits); }

// The finalizer of MurmurHash3 (Appleby 2011).
u64 mix(u64 x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdULL;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

// A word's hash follows another's: the hash of a sequence.
u64 follow(u64 sequence, u64 next) { return mix(rotate(sequence, 27) * 0x9E3779B97F4A7C15ULL + next); }

u64 hash_bytes(const u8* p, const u8* end) {
  u64 h = 0x243F6A8885A308D3ULL ^ u64(end - p);
  for (; end - p >= 8; p += 8) {
    u64 k;
    std::memcpy(&k, p, 8);
    h = rotate(h ^ (k * 0x87c37b91114253d5ULL), 31) * 0x4cf5ad432745937fULL;
  }
  u64 rest = 0;
  std::memcpy(&rest, p, end - p);
  return mix(rotate(h ^ (rest * 0x87c37b91114253d5ULL), 31) * 0x4cf5ad432745937fULL);
}

// A maximal run of characters that are not spaces; an ideograph, and a letter of a script that is written without
// spaces, is a word of its own.
struct Word {
  const u8 *begin, *end;
  u64 hash;    // of its letters and digits in lower case; 0 if there are none
  u32 chars;   // code points without punctuation
  bool alpha;  // has a letter
};

template <class Use>
void each_word(const u8* p, const u8* end, Use use) {
  Word word{nullptr, nullptr, 0, 0, false};
  u64 h = 0;
  auto close = [&](const u8* at) {
    if (!word.begin) return;
    word.end = at;
    word.hash = word.chars ? mix(h) | 1 : 0;
    use(word);
    word = {nullptr, nullptr, 0, 0, false};
    h = 0;
  };
  while (p < end) {
    const u8* at = p;
    u32 c = decode(p, end);
    u8 kind = class_of(c);
    if (kind & SPACE) {
      close(at);
      continue;
    }
    if (kind & IDEOGRAPH) close(at);
    if (!word.begin) word.begin = at;
    if (!(kind & PUNCTUATION)) {
      ++word.chars;
      word.alpha |= (kind & ALPHA) != 0;
      h = (h ^ lower(c)) * 0x9E3779B97F4A7C15ULL;
      h ^= h >> 29;
    }
    if (kind & IDEOGRAPH) close(p);
  }
  close(end);
}

std::vector<Word> words_of(const u8* p, const u8* end, bool with_symbols = false) {
  std::vector<Word> words;
  words.reserve((end - p) / 5 + 1);
  each_word(p, end, [&](const Word& w) {
    if (w.hash || with_symbols) words.push_back(w);
  });
  return words;
}

struct Span {
  const u8 *begin, *end;
};

// Without spaces at both ends.
Span stripped(const u8* p, const u8* end) {
  while (p < end) {
    const u8* at = p;
    if (!(class_of(decode(p, end)) & SPACE)) {
      p = at;
      break;
    }
  }
  while (end > p) {
    const u8* at = end - 1;
    while (at > p && (*at & 0xC0) == 0x80) --at;
    const u8* next = at;
    if (!(class_of(decode(next, end)) & SPACE)) break;
    end = at;
  }
  return {p, end};
}

// Parts between newlines (paragraphs: two or more newlines, with nothing but spaces between), without those that are
// blank.
template <class Use>
void each_line(const u8* p, const u8* end, Use use) {
  while (p < end) {
    const u8* stop = static_cast<const u8*>(std::memchr(p, '\n', end - p));
    if (!stop) stop = end;
    Span line = stripped(p, stop);
    if (line.begin < line.end) use(line);
    p = stop + 1;
  }
}

template <class Use>
void each_paragraph(const u8* p, const u8* end, Use use) {
  Span open{nullptr, nullptr};
  while (p < end) {
    const u8* stop = static_cast<const u8*>(std::memchr(p, '\n', end - p));
    if (!stop) stop = end;
    Span line = stripped(p, stop);
    if (line.begin == line.end) {
      if (open.begin) use(open);
      open = {nullptr, nullptr};
    } else {
      if (!open.begin) open.begin = line.begin;
      open.end = line.end;
    }
    p = stop + 1;
  }
  if (open.begin) use(open);
}

// Code points.
i64 length(const u8* p, const u8* end) {
  i64 n = 0;
  for (; p < end; ++p) n += (*p & 0xC0) != 0x80;
  return n;
}

// How often 64-bit hashes occur, by open addressing. Zero is never a key.
class Counts {
 public:
  void reset(size_t most) {
    size_t size = 16;
    while (size < 2 * most) size *= 2;
    if (size > keys_.size()) {
      keys_.assign(size, 0);
      counts_.resize(size);
    } else {
      std::fill(keys_.begin(), keys_.begin() + size, 0);
    }
    mask_ = size - 1;
  }

  u32& operator[](u64 key) {
    size_t i = key & mask_;
    while (keys_[i] && keys_[i] != key) i = (i + 1) & mask_;
    if (!keys_[i]) {
      keys_[i] = key;
      counts_[i] = 0;
    }
    return counts_[i];
  }

 private:
  std::vector<u64> keys_;
  std::vector<u32> counts_;
  size_t mask_ = 0;
};

}  // namespace

extern "C" void set_tables(u8* kinds, u32* lowers, u32 size) {
  classes = kinds;
  lower_of = lowers;
  table_size = size;
}
