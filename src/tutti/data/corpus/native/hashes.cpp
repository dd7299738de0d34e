// Hashes of documents, of their lines and paragraphs, of windows of words, and MinHash.

namespace {

enum Unit { DOCUMENT, PARAGRAPH, LINE };

// Of its words in lower case without punctuation; of its bytes where it has no words.
u64 hash_words(const u8* begin, const u8* end) {
  u64 h = 1;
  bool any = false;
  each_word(begin, end, [&](const Word& w) {
    if (w.hash) h = follow(h, w.hash), any = true;
  });
  return any ? h : hash_bytes(begin, end);
}

u64 hash_of(const u8* begin, const u8* end, bool words) { return words ? hash_words(begin, end) : hash_bytes(begin, end); }

// The hash of n words from each word that has as many after it.
template <class Use>
void each_window(const std::vector<Word>& words, size_t n, Use use) {
  for (size_t i = 0; i + n <= words.size(); ++i) {
    u64 h = 1;
    for (size_t k = i; k < i + n; ++k) h = follow(h, words[k].hash);
    use(i, h);
  }
}

}  // namespace

extern "C" void hash_documents(i64 n, const int32_t* offsets, const u8* data, bool words, u64* out) {
  for (i64 i = 0; i < n; ++i) out[i] = hash_of(data + offsets[i], data + offsets[i + 1], words);
}

// The hash of the first word of each text.
extern "C" void word_hashes(i64 n, const int32_t* offsets, const u8* data, u64* out) {
  for (i64 i = 0; i < n; ++i) {
    std::vector<Word> words = words_of(data + offsets[i], data + offsets[i + 1]);
    out[i] = words.empty() ? 0 : words[0].hash;
  }
}

// Units of at least `least` bytes: their document, first and last byte in it, and hash. Returns how many there are;
// writes nothing if `hashes` is null.
extern "C" i64 hash_units(i64 n, const int32_t* offsets, const u8* data, int unit, bool words, i64 least, u32* documents,
                          u32* begins, u32* ends, u64* hashes) {
  i64 count = 0;
  for (i64 i = 0; i < n; ++i) {
    const u8 *begin = data + offsets[i], *end = data + offsets[i + 1];
    auto use = [&](Span part) {
      if (part.end - part.begin < least) return;
      if (hashes) {
        documents[count] = i;
        begins[count] = part.begin - begin;
        ends[count] = part.end - begin;
        hashes[count] = hash_of(part.begin, part.end, words);
      }
      ++count;
    };
    if (unit == LINE) each_line(begin, end, use);
    else each_paragraph(begin, end, use);
  }
  return count;
}

// Windows of `size` words: as hash_units. A polynomial of the words' hashes, so that a window costs one step.
extern "C" i64 hash_windows(i64 n, const int32_t* offsets, const u8* data, i64 size, u32* documents, u32* begins, u32* ends,
                            u64* hashes) {
  constexpr u64 BASE = 0x9E3779B97F4A7C15ULL;
  u64 power = 1;
  for (i64 k = 0; k < size; ++k) power *= BASE;
  i64 count = 0;
  for (i64 i = 0; i < n; ++i) {
    const u8 *begin = data + offsets[i], *end = data + offsets[i + 1];
    std::vector<Word> words = words_of(begin, end);
    u64 h = 0;
    for (i64 k = 0; k < i64(words.size()); ++k) {
      h = h * BASE + words[k].hash - (k >= size ? power * words[k - size].hash : 0);
      if (k < size - 1) continue;
      if (hashes) {
        documents[count] = i;
        begins[count] = words[k - size + 1].begin - begin;
        ends[count] = words[k].end - begin;
        hashes[count] = mix(h);
      }
      ++count;
    }
  }
  return count;
}

// MinHash of the set of n-grams of words (Broder 1997): keys of `bands` bands of `rows` minima each. The hash of row j
// is a[j] x + b[j] modulo 2^64, and its upper bits count. A document with fewer words has one n-gram: all of them.
extern "C" void minhash(i64 n, const int32_t* offsets, const u8* data, i64 size, i64 bands, i64 rows, const u64* a,
                        const u64* b, u64* keys, u32* shingles) {
  const i64 k = bands * rows;
  std::vector<u64> least(k), grams;
  for (i64 i = 0; i < n; ++i) {
    std::vector<Word> words = words_of(data + offsets[i], data + offsets[i + 1]);
    grams.clear();
    each_window(words, size, [&](size_t, u64 h) { grams.push_back(h); });
    if (grams.empty() && !words.empty()) each_window(words, words.size(), [&](size_t, u64 h) { grams.push_back(h); });
    std::fill(least.begin(), least.end(), ~u64(0));
    u64* lows = least.data();
    for (u64 x : grams)
      for (i64 j = 0; j < k; ++j) {
        u64 h = a[j] * x + b[j];
        lows[j] = h < lows[j] ? h : lows[j];
      }
    shingles[i] = grams.size();
    for (i64 band = 0; band < bands; ++band) {
      u64 h = band + 1;
      for (i64 j = band * rows; j < (band + 1) * rows; ++j) h = follow(h, lows[j]);
      keys[i * bands + band] = h;
    }
  }
}

// Signatures themselves, for tests and for estimates of similarity: (n, k) minima.
extern "C" void signatures(i64 n, const int32_t* offsets, const u8* data, i64 size, i64 k, const u64* a, const u64* b,
                           u64* out) {
  for (i64 i = 0; i < n; ++i) {
    std::vector<Word> words = words_of(data + offsets[i], data + offsets[i + 1]);
    u64* lows = out + i * k;
    std::fill(lows, lows + k, ~u64(0));
    each_window(words, std::min<size_t>(size, words.size()), [&](size_t, u64 x) {
      for (i64 j = 0; j < k; ++j) lows[j] = std::min(lows[j], a[j] * x + b[j]);
    });
  }
}

// Joins the sets of pairs (a[i], b[i]); parents[x] is the least member of the set of x afterwards. parents: size n,
// each its own or from an earlier call.
extern "C" void join_sets(i64 count, const u64* a, const u64* b, u64* parents) {
  auto root = [&](u64 x) {
    while (parents[x] != x) x = parents[x] = parents[parents[x]];
    return x;
  };
  for (i64 i = 0; i < count; ++i) {
    u64 x = root(a[i]), y = root(b[i]);
    if (x < y) parents[y] = x;
    else parents[x] = y;
  }
}

// Removes byte ranges, sorted by document and start, which may overlap. Writes texts and their offsets (n + 1).
extern "C" void remove_ranges(i64 n, const int32_t* offsets, const u8* data, i64 count, const u32* documents,
                              const u32* begins, const u32* ends, u8* out, int32_t* out_offsets) {
  i64 r = 0;
  u8* q = out;
  for (i64 i = 0; i < n; ++i) {
    out_offsets[i] = q - out;
    const u8 *begin = data + offsets[i], *p = begin, *end = data + offsets[i + 1];
    for (; r < count && documents[r] == i; ++r) {
      const u8 *from = begin + begins[r], *to = begin + ends[r];
      if (from > p) {
        std::memcpy(q, p, from - p);
        q += from - p;
      }
      p = std::max(p, to);
    }
    std::memcpy(q, p, end - p);
    q += end - p;
  }
  out_offsets[n] = q - out;
}

// Whether any n-gram of sizes[..] words is among the sorted hashes: for each document how many places match, and the
// bytes of the first match.
extern "C" void find_phrases(i64 n, const int32_t* offsets, const u8* data, const i64* sizes, i64 kinds, const u64* sorted,
                             i64 count, u32* places, u32* begins, u32* ends) {
  if (!count) {
    std::fill(places, places + n, 0);
    return;
  }
  constexpr u64 BITS = 1 << 22;  // a filter in front of the search
  std::vector<u64> filter(BITS / 64);
  for (i64 j = 0; j < count; ++j) filter[(sorted[j] % BITS) / 64] |= 1ULL << (sorted[j] % 64);
  for (i64 i = 0; i < n; ++i) {
    const u8* begin = data + offsets[i];
    std::vector<Word> words = words_of(begin, data + offsets[i + 1]);
    places[i] = 0;
    begins[i] = ends[i] = 0;
    for (i64 kind = 0; kind < kinds; ++kind)
      each_window(words, sizes[kind], [&](size_t at, u64 h) {
        if (!(filter[(h % BITS) / 64] >> (h % 64) & 1) || !std::binary_search(sorted, sorted + count, h)) return;
        if (!places[i]++) {
          begins[i] = words[at].begin - begin;
          ends[i] = words[at + sizes[kind] - 1].end - begin;
        }
      });
  }
}

extern "C" void count_words(i64 n, const int32_t* offsets, const u8* data, i64* counts) {
  for (i64 i = 0; i < n; ++i) counts[i] = words_of(data + offsets[i], data + offsets[i + 1]).size();
}

// The hashes of all n-grams of a batch. Returns how many there are; writes nothing if `out` is null.
extern "C" i64 phrase_hashes(i64 n, const int32_t* offsets, const u8* data, i64 size, u64* out) {
  i64 count = 0;
  for (i64 i = 0; i < n; ++i)
    each_window(words_of(data + offsets[i], data + offsets[i + 1]), size, [&](size_t, u64 h) {
      if (out) out[count] = h;
      ++count;
    });
  return count;
}
