// Rules about lines (lines.py): lines that break one are cut out of their document.

namespace {

enum LineRule { KEEP, UNPUNCTUATED, TOO_FEW_WORDS, LONG_WORD, PHRASE, LINE_RULES };

bool has_phrase(const std::string& text, const char* phrases, i64 count) {
  const char* phrase = phrases;
  for (i64 k = 0; k < count; ++k, phrase += std::strlen(phrase) + 1)
    if (text.find(phrase) != std::string::npos) return true;
  return false;
}

// In ASCII only: the phrases are.
std::string lowered(const u8* p, const u8* end) {
  std::string s(reinterpret_cast<const char*>(p), end - p);
  for (char& c : s)
    if (c >= 'A' && c <= 'Z') c += 32;
  return s;
}

i64 sentences(Span line) {
  i64 count = 0;
  bool inside = false;
  for (const u8* p = line.begin; p < line.end;) {
    u32 c = decode(p, line.end);
    bool stop = any_of(c, {'.', '!', '?', 0x3002, 0xFF01, 0xFF1F, 0x061F, 0x0964});
    if (stop && inside && (p == line.end || c > 0x7F || (class_of(*p) & (SPACE | PUNCTUATION)))) ++count, inside = false;
    else if (!stop) inside |= (class_of(c) & (ALPHA | DIGIT)) != 0;
  }
  return count + inside;
}

}  // namespace

// phrases: `count` strings in lower case, each ended by a zero byte. out: room for the whole batch. cut_lines and
// cut_bytes: (n, LINE_RULES). sentence_counts: (n,) of what is left.
extern "C" void filter_lines(i64 n, const int32_t* offsets, const u8* data, i64 least_words, i64 longest_word,
                             bool punctuated, const char* phrases, i64 count, u8* out, int32_t* out_offsets,
                             i64* cut_lines, i64* cut_bytes, i64* sentence_counts) {
  u8* q = out;
  for (i64 i = 0; i < n; ++i) {
    out_offsets[i] = q - out;
    u8* start = q;
    sentence_counts[i] = 0;
    const u8* end = data + offsets[i + 1];
    for (const u8* p = data + offsets[i]; p < end;) {
      const u8* stop = static_cast<const u8*>(std::memchr(p, '\n', end - p));
      if (!stop) stop = end;
      Span line = stripped(p, stop);
      LineRule broken = KEEP;
      if (line.begin < line.end) {
        i64 words = 0, longest = 0;
        each_word(line.begin, line.end, [&](const Word& w) {
          ++words;
          longest = std::max<i64>(longest, length(w.begin, w.end));
        });
        if (longest_word && longest > longest_word) broken = LONG_WORD;
        else if (punctuated && (!ends_sentence(last_of(line)) || ends_in_ellipsis(line))) broken = UNPUNCTUATED;
        else if (words < least_words) broken = TOO_FEW_WORDS;
        else if (count && has_phrase(lowered(line.begin, line.end), phrases, count)) broken = PHRASE;
      }
      if (broken == KEEP) {
        if (q > start) *q++ = '\n';
        std::memcpy(q, p, stop - p);
        q += stop - p;
        if (line.begin < line.end) sentence_counts[i] += sentences(line);
      } else {
        ++cut_lines[i * LINE_RULES + broken];
        cut_bytes[i * LINE_RULES + broken] += stop - p;
      }
      p = stop + 1;
    }
    while (q > start && (q[-1] == '\n' || q[-1] == ' ')) --q;
  }
  out_offsets[n] = q - out;
}
