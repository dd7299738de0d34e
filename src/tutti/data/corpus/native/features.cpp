// Numbers that rules about documents compare with thresholds (rules.py): one row of `FEATURES` for each document.

#define FEATURES(F)                                                                                              \
  F(characters) F(bytes) F(words) F(mean_word_length) F(hashes_per_word) F(ellipses_per_word) F(alphabetic_words) \
  F(stop_words) F(lines) F(bullet_lines) F(ellipsis_lines) F(punctuated_lines) F(short_lines) F(mean_line_length) \
  F(max_line_length) F(newlines_per_word) F(duplicate_lines) F(duplicate_line_characters) F(paragraphs)           \
  F(duplicate_paragraphs) F(duplicate_paragraph_characters) F(top_2_gram) F(top_3_gram) F(top_4_gram)             \
  F(duplicate_5_grams) F(duplicate_6_grams) F(duplicate_7_grams) F(duplicate_8_grams) F(duplicate_9_grams)        \
  F(duplicate_10_grams) F(letters) F(digits) F(uppercase_letters) F(alphanumeric) F(curly_brackets)

namespace {

enum Feature {
#define F(name) name,
  FEATURES(F)
#undef F
      COUNT
};

constexpr i64 SHORT_LINE = 30;  // code points (Penedo et al. 2024)

bool any_of(u32 c, std::initializer_list<u32> those) { return std::find(those.begin(), those.end(), c) != those.end(); }

bool is_bullet(u32 c) {
  return any_of(c, {'-', '*', 0x2022, 0x2023, 0x25B6, 0x25C0, 0x25E6, 0x25A0, 0x25A1, 0x25AA, 0x25AB, 0x2013, 0x25CF});
}

bool ends_sentence(u32 c) {
  return any_of(c, {'.', '!', '?', '"', '\'', 0x201D, 0x2019, 0x2026, 0x3002, 0xFF01, 0xFF1F, 0xFF0E, 0x061F, 0x06D4,
                    0x0964, 0x0965, 0x300D, 0x300F, 0x1362, 0x1803, 0x104B});
}

u32 last_of(Span line) {
  const u8* at = line.end - 1;
  while (at > line.begin && (*at & 0xC0) == 0x80) --at;
  return decode(at, line.end);
}

bool ends_in_ellipsis(Span line) {
  return last_of(line) == 0x2026 || (line.end - line.begin >= 3 && !std::memcmp(line.end - 3, "...", 3));
}

struct Repeats {
  i64 parts = 0, repeated = 0, characters = 0;  // characters of the repeated ones

  void add(Span part, Counts& counts) {
    ++parts;
    if (counts[hash_bytes(part.begin, part.end) | 1]++) {
      ++repeated;
      characters += length(part.begin, part.end);
    }
  }
};

// The characters of the most frequent n-gram that occurs at least twice.
i64 top_n_gram(const std::vector<Word>& words, size_t n, Counts& counts) {
  counts.reset(words.size());
  u32 most = 1;
  i64 characters = 0;
  for (size_t i = 0; i + n <= words.size(); ++i) {
    u64 h = 1;
    i64 size = 0;
    for (size_t k = i; k < i + n; ++k) h = follow(h, words[k].hash), size += words[k].chars;
    u32 count = ++counts[h | 1];
    if (count > 1 && (count > most || (count == most && size * count > characters))) most = count, characters = size * count;
  }
  return characters;
}

// The characters of words in n-grams that occurred before, each word counted once. hashes[i]: of n words from i.
i64 repeated_n_grams(const std::vector<Word>& words, const std::vector<u64>& hashes, size_t n, Counts& counts) {
  counts.reset(words.size());
  i64 characters = 0;
  for (size_t i = 0; i + n <= words.size();) {
    if (counts[hashes[i] | 1]++) {
      for (size_t k = i; k < i + n; ++k) characters += words[k].chars;
      i += n;
    } else {
      ++i;
    }
  }
  return characters;
}

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace

extern "C" const char* feature_names() {
#define F(name) #name " "
  return FEATURES(F);
#undef F
}

// stop_words: `stops` hashes, sorted. out: (n, COUNT).
extern "C" void features(i64 n, const int32_t* offsets, const u8* data, const u64* stop_hashes, i64 stops, double* out) {
  Counts counts;
  std::vector<u64> seen_stops, hashes;
  for (i64 i = 0; i < n; ++i) {
    double* row = out + i * COUNT;
    const u8 *begin = data + offsets[i], *end = data + offsets[i + 1];
    std::fill(row, row + COUNT, 0.0);
    i64 chars = 0, alphas = 0, numbers = 0, uppers = 0, curly = 0, hash_signs = 0, ellipses = 0, newlines = 0, dots = 0;
    for (const u8* p = begin; p < end;) {
      u32 c = decode(p, end);
      u8 kind = class_of(c);
      ++chars;
      alphas += (kind & ALPHA) != 0;
      numbers += (kind & DIGIT) != 0;
      uppers += (kind & UPPER) != 0;
      curly += c == '{' || c == '}';
      hash_signs += c == '#';
      newlines += c == '\n';
      dots = c == '.' ? dots + 1 : 0;
      if (dots == 3) ++ellipses, dots = 0;
      ellipses += c == 0x2026;
    }
    std::vector<Word> all = words_of(begin, end, true), words;
    i64 with_letters = 0, word_chars = 0;
    seen_stops.clear();
    for (const Word& w : all) {
      with_letters += w.alpha;
      if (!w.hash) continue;
      words.push_back(w);
      word_chars += w.chars;
      if (std::binary_search(stop_hashes, stop_hashes + stops, w.hash)) seen_stops.push_back(w.hash);
    }
    std::sort(seen_stops.begin(), seen_stops.end());
    seen_stops.erase(std::unique(seen_stops.begin(), seen_stops.end()), seen_stops.end());

    i64 line_count = 0, bullets = 0, elliptic = 0, punctuated = 0, brief = 0, line_chars = 0, longest = 0;
    Repeats repeated_lines, repeated_paragraphs;
    counts.reset(newlines + 1);
    each_line(begin, end, [&](Span line) {
      const u8* p = line.begin;
      i64 size = length(line.begin, line.end);
      ++line_count;
      line_chars += size;
      longest = std::max(longest, size);
      bullets += is_bullet(decode(p, line.end));
      elliptic += ends_in_ellipsis(line);
      punctuated += ends_sentence(last_of(line));
      brief += size <= SHORT_LINE;
      repeated_lines.add(line, counts);
    });
    counts.reset(newlines + 1);
    each_paragraph(begin, end, [&](Span part) { repeated_paragraphs.add(part, counts); });

    double w = words.size();
    row[characters] = chars;
    row[bytes] = end - begin;
    row[Feature::words] = w;
    row[mean_word_length] = share(word_chars, w);
    row[hashes_per_word] = share(hash_signs, w);
    row[ellipses_per_word] = share(ellipses, w);
    row[alphabetic_words] = share(with_letters, all.size());
    row[stop_words] = seen_stops.size();
    row[lines] = line_count;
    row[bullet_lines] = share(bullets, line_count);
    row[ellipsis_lines] = share(elliptic, line_count);
    row[punctuated_lines] = share(punctuated, line_count);
    row[short_lines] = share(brief, line_count);
    row[mean_line_length] = share(line_chars, line_count);
    row[max_line_length] = longest;
    row[newlines_per_word] = share(newlines, w);
    row[duplicate_lines] = share(repeated_lines.repeated, line_count);
    row[duplicate_line_characters] = share(repeated_lines.characters, chars);
    row[paragraphs] = repeated_paragraphs.parts;
    row[duplicate_paragraphs] = share(repeated_paragraphs.repeated, repeated_paragraphs.parts);
    row[duplicate_paragraph_characters] = share(repeated_paragraphs.characters, chars);
    for (int k = 2; k <= 4; ++k) row[top_2_gram + k - 2] = share(top_n_gram(words, k, counts), word_chars);
    hashes.assign(words.size(), 1);
    for (size_t k = 0; k < 10; ++k) {
      for (size_t j = 0; j + k < words.size(); ++j) hashes[j] = follow(hashes[j], words[j + k].hash);
      if (k >= 4) row[duplicate_5_grams + k - 4] = share(repeated_n_grams(words, hashes, k + 1, counts), word_chars);
    }
    row[letters] = share(alphas, chars);
    row[digits] = share(numbers, chars);
    row[uppercase_letters] = share(uppers, alphas);
    row[alphanumeric] = share(alphas + numbers, chars);
    row[curly_brackets] = curly;
  }
}
