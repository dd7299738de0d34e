// Language models of n-grams and features of classifiers (perplexity.py, quality.py).

namespace {

constexpr u64 START = 0x51ED270B27C14F31ULL, STOP = 0x0F8B4C5D1A2E3F97ULL;  // the ends of a sentence

// The sentences of a document, lines here: hashes of their words between START and STOP.
template <class Use>
void each_sentence(const u8* begin, const u8* end, Use use) {
  std::vector<u64> sentence;
  each_line(begin, end, [&](Span line) {
    sentence.assign(1, START);
    each_word(line.begin, line.end, [&](const Word& w) {
      if (w.hash) sentence.push_back(w.hash);
    });
    sentence.push_back(STOP);
    if (sentence.size() > 2) use(sentence);
  });
}

u64 gram(const u64* words, i64 n) {
  u64 h = n;
  for (i64 k = 0; k < n; ++k) h = follow(h, words[k]);
  return h | 1;
}

// A table of hashes by open addressing, as written by hash_table.
struct Table {
  const u64* keys;
  u64 mask;

  i64 find(u64 key) const {
    u64 i = (key >> 1) & mask;
    while (keys[i] && keys[i] != key) i = (i + 1) & mask;
    return keys[i] ? i64(i) : -1;
  }
};

}  // namespace

// N-grams of all sentences: hashes of the n-gram, of its context (all words but the last) and of its suffix (all but
// the first). Returns how many there are; writes nothing if `grams` is null.
extern "C" i64 count_n_grams(i64 n, const int32_t* offsets, const u8* data, i64 size, u64* grams, u64* contexts,
                             u64* suffixes) {
  i64 count = 0;
  for (i64 i = 0; i < n; ++i)
    each_sentence(data + offsets[i], data + offsets[i + 1], [&](const std::vector<u64>& s) {
      for (i64 k = size == 1 ? 1 : 0; k + size <= i64(s.size()); ++k, ++count) {
        if (!grams) continue;
        grams[count] = gram(&s[k], size);
        contexts[count] = gram(&s[k], size - 1);
        suffixes[count] = gram(&s[k + 1], size - 1);
      }
    });
  return count;
}

// Puts hashes into a table of `size` slots (a power of two): slots[i] is the slot of key i.
extern "C" void hash_table(i64 n, const u64* keys, i64 size, u64* table, i64* slots) {
  std::fill(table, table + size, 0);
  for (i64 i = 0; i < n; ++i) {
    u64 k = (keys[i] >> 1) & (size - 1);
    while (table[k]) k = (k + 1) & (size - 1);
    table[k] = keys[i];
    slots[i] = k;
  }
}

// The sum of log2 probabilities of the words of each document, and how many words there are, ends of lines included.
// tables[m], probabilities[m], backoffs[m]: of (m + 1)-grams, in their slots. unknown: log2 probability of a word that
// is in no unigram. A model of order N gives the probability of the longest n-gram that it has, times the backoff
// weights of the longer contexts.
extern "C" void score_n_grams(i64 n, const int32_t* offsets, const u8* data, i64 order, const u64** tables,
                              const i64* sizes, const float** probabilities, const float** backoffs, double unknown,
                              double* sums, i64* words) {
  std::vector<Table> t;
  for (i64 m = 0; m < order; ++m) t.push_back({tables[m], u64(sizes[m] - 1)});
  for (i64 i = 0; i < n; ++i) {
    sums[i] = 0;
    words[i] = 0;
    each_sentence(data + offsets[i], data + offsets[i + 1], [&](const std::vector<u64>& s) {
      for (i64 k = 1; k < i64(s.size()); ++k) {
        double p = 0;
        i64 m = std::min(order - 1, k);  // words of context
        for (; m >= 0; --m) {
          i64 slot = t[m].find(gram(&s[k - m], m + 1));
          if (slot >= 0) {
            p += probabilities[m][slot];
            break;
          }
          if (m) {
            i64 context = t[m - 1].find(gram(&s[k - m], m));
            if (context >= 0) p += backoffs[m - 1][context];
          }
        }
        sums[i] += m < 0 ? p + unknown : p;
        ++words[i];
      }
    });
  }
}

// Indices of hashed words and pairs of words in [0, buckets), of the first `most` words of each document: of document i
// at [begins[i], begins[i + 1]). out: room for 2 x most x n.
extern "C" void hashed_words(i64 n, const int32_t* offsets, const u8* data, i64 buckets, i64 most, i64* begins,
                             i64* out) {
  i64 count = 0;
  for (i64 i = 0; i < n; ++i) {
    begins[i] = count;
    u64 before = 0;
    i64 used = 0;
    each_word(data + offsets[i], data + offsets[i + 1], [&](const Word& w) {
      if (!w.hash || used >= most) return;
      ++used;
      out[count++] = w.hash % buckets;
      if (before) out[count++] = follow(follow(1, before), w.hash) % buckets;
      before = w.hash;
    });
  }
  begins[n] = count;
}
