#include "src/jobs/job_line.h"

#include "src/jobs/json_text.h"
#include "tests/jobs/job_world.h"
#include "tests/text/tiny_tokenizer.h"

using namespace kvw;
using namespace kvw::test;

namespace {

const TinyTokenizer& chat_tokenizer() {
    static const TinyTokenizer tokenizer(
        ByteVocabulary{.control = {"<|im_start|>", "<|im_end|>"}, .eos = "<|im_end|>"});
    return tokenizer;
}

class Parser {
  public:
    explicit Parser(JobOptions options = {}, bool stream = false)
        : chat_(*ChatTemplate::named("chatml")),
          parser_(std::move(options), *chat_tokenizer(), &chat_, stream) {}

    JobLine parse(const std::string& text) {
        RawLine raw{.number = ++number_,
                    .bytes = text,
                    .digest = sha256(text),
                    .length = text.size(),
                    .too_long = text.size() > kLineBytesMax};
        raw.bytes = raw.too_long ? "" : text;
        return parser_.parse(raw);
    }
    // The code of what is wrong with it, "" when nothing is.
    std::string code(const std::string& text) {
        const JobLine line = parse(text);
        if (line.error) {
            CHECK(line.error->message.find("secret") == std::string::npos);
            CHECK(line.error->message.starts_with("line " + std::to_string(number_) + ": "));
            CHECK(line.request.prompt_ids.empty());
            CHECK(line.bytes == (text.size() > kLineBytesMax ? "" : text));
        }
        CHECK(!line.tenant.empty());
        return line.error ? line.error->code : "";
    }
    // The same of a line with this body (JSON) and these members (JSON) beside it.
    std::string body_code(const std::string& body, const std::string& more = "",
                          const std::string& url = "/v1/completions") {
        return code(R"({"custom_id":"c)" + std::to_string(++ids_) + R"(","method":"POST","url":")" +
                    url + R"(","body":)" + body + more + "}");
    }

  private:
    ChatTemplate chat_;
    LineParser parser_;
    std::uint64_t number_ = 0, ids_ = 0;
};

std::string nested(std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

}  // namespace

TEST_CASE("JSON is refused beyond 64 levels, with a name twice, and where it is none") {
    CHECK(parse_json(nested(64)).problem.empty());
    CHECK(parse_json(nested(65)).problem == "it is nested deeper than 64 levels");
    CHECK(parse_json(nested(1'000'000)).problem == "it is nested deeper than 64 levels");
    CHECK(parse_json(R"({"a":1,"b":{"a":2},"a":3})").problem ==
          "a name occurs twice in one object");
    CHECK(parse_json(R"({"a":[1,-2,2.5,true,null,"x"],"b":{}})").value.dump() ==
          R"({"a":[1,-2,2.5,true,null,"x"],"b":{}})");
    CHECK(parse_json(R"(["secret)").problem == "it is not JSON from byte 8 on");
    for (const char* bad : {"", " ", "{", "[1,]", "{} {}", "nul", "1e999", "\xef\xbb\xbf{}",
                            R"("\ud800")", "\"\xff\"", "NaN", "'a'"}) {
        CAPTURE(bad);
        CHECK_FALSE(parse_json(bad).problem.empty());
    }
}

TEST_CASE("every kind of bad line has its code and says its number") {
    Parser parser;
    CHECK(
        parser
            .code(
                "\xef\xbb\xbf"
                R"({"custom_id":"bom","method":"POST","url":"/v1/completions","body":{"prompt":"a"}})")
            .empty());
    CHECK(parser.code("\xef\xbb\xbf{}") == "invalid_json_line");
    CHECK(parser.code("") == "empty_line");
    CHECK(parser.code("   ") == "invalid_json_line");
    CHECK(parser.code("secret") == "invalid_json_line");
    CHECK(parser.code("\"secret\"") == "invalid_json_line");
    CHECK(parser.code("[]") == "invalid_json_line");
    CHECK(parser.code("{\"custom_id\":\"secret\xff\"}") == "invalid_utf8");
    CHECK(parser.code(nested(100)) == "invalid_json_line");
    CHECK(parser.code("{\"custom_id\":\"" + std::string(kLineBytesMax, 'x') + "\"}") ==
          "line_too_long");
    CHECK(parser.code("{}") == "missing_custom_id");
    CHECK(parser.code(R"({"custom_id":7})") == "invalid_custom_id");
    CHECK(parser.code(R"({"custom_id":""})") == "invalid_custom_id");
    CHECK(parser.code(R"({"custom_id":")" + std::string(1025, 'x') + "\"}") == "invalid_custom_id");
    CHECK(parser.code(R"({"custom_id":"bom"})") == "duplicate_custom_id");
    CHECK(parser.code(R"({"custom_id":"a"})") == "missing_field");
    CHECK(parser.code(R"({"custom_id":"a"})") == "duplicate_custom_id");
    CHECK(parser.code(R"({"custom_id":"b","method":"GET"})") == "invalid_method");
    CHECK(parser.code(R"({"custom_id":"c","method":"POST","url":"/v1/embeddings"})") ==
          "url_mismatch");
    CHECK(parser.code(R"({"custom_id":"d","method":"POST","url":"/v1/completions"})") ==
          "missing_field");
    CHECK(parser.code(
              R"({"custom_id":"e","method":"POST","url":"/v1/completions","body":"secret"})") ==
          "invalid_type");
    CHECK(parser.body_code(R"({"prompt":"x"},"extra":1)") == "unknown_field");
    CHECK(parser.body_code(R"({"prompt":"x"},"tenant":"acme")") == "tenant_not_allowed");
    CHECK(parser.body_code(R"({"prompt":"x"},"session":"")") == "invalid_session");
    CHECK(parser.body_code(R"({"prompt":"x"},"session":")" + std::string(65, 's') + "\"") ==
          "invalid_session");
    CHECK(parser.body_code(R"({"prompt":"x"},"cache_scope":"world")") == "invalid_value");
    CHECK(parser.body_code(R"({"prompt":"x"},"cache_scope":"session","session":"s")").empty());
    CHECK(parser.code(R"({"cancel":"a"})") == "missing_custom_id");
}

TEST_CASE("fields of the body are checked for type and range") {
    Parser parser;
    const auto with = [&](const std::string& field) {
        return parser.body_code(R"({"prompt":"x",)" + field + "}");
    };
    for (const char* good :
         {R"("max_tokens":1)", R"("max_tokens":null)",
          R"("max_tokens":4,"max_completion_tokens":4)", R"("temperature":0)", R"("temperature":2)",
          R"("top_p":0.5)", R"("seed":-1)", R"("seed":18446744073709551615)", R"("stop":"\n")",
          R"("stop":["a","b"])", R"("n":1)", R"("stream":false)", R"("logprobs":5)",
          R"("user":"u")", R"("model":"any")", R"("presence_penalty":-2,"frequency_penalty":2)"}) {
        CAPTURE(good);
        CHECK(with(good).empty());
    }
    for (const char* bad : {R"("max_tokens":0)", R"("max_tokens":-1)", R"("max_tokens":4294967296)",
                            R"("max_tokens":4,"max_completion_tokens":5)", R"("temperature":2.1)",
                            R"("temperature":-0.1)", R"("top_p":1.5)", R"("stop":"")",
                            R"("stop":["a",""])", R"("presence_penalty":3)", R"("logprobs":21)"}) {
        CAPTURE(bad);
        CHECK(with(bad) == "invalid_value");
    }
    for (const char* bad :
         {R"("max_tokens":"4")", R"("max_tokens":1.5)", R"("temperature":"hot")", R"("top_p":[])",
          R"("seed":1.5)", R"("stop":[1])", R"("stop":{})", R"("logprobs":true)", R"("user":1)",
          R"("model":{})", R"("frequency_penalty":true)"}) {
        CAPTURE(bad);
        CHECK(with(bad) == "invalid_type");
    }
    CHECK(with(R"("n":2)") == "unsupported_value");
    CHECK(with(R"("stream":true)") == "unsupported_value");
    CHECK(with(R"("stream":"secret")") == "unsupported_value");
    CHECK(with(R"("top_k":5)") == "unknown_field");
    CHECK(with(R"("messages":[])") == "unknown_field");
    CHECK(with(R"("best_of":1)") == "unknown_field");
    CHECK(parser.body_code(R"({"prompt":["x"]})") == "invalid_type");
    CHECK(parser.body_code(R"({"prompt":""})") == "invalid_value");
    CHECK(parser.body_code(R"({})") == "missing_field");
    Parser lenient({.allow_unknown = true});
    CHECK(lenient.body_code(R"({"prompt":"x","top_k":5},"extra":1)").empty());
    CHECK(lenient.body_code(R"({"prompt":"x","n":2})") == "unsupported_value");
    CHECK(lenient.body_code(R"({"prompt":"x"},"tenant":"acme")") == "tenant_not_allowed");
}

TEST_CASE("a chat is rendered with the template, whose marks no message can make") {
    Parser parser({.system = "Be brief."});
    const auto chat = [](const std::string& messages) {
        return R"({"custom_id":"x","method":"POST","url":"/v1/chat/completions","body":{"messages":)" +
               messages + "}}";
    };
    const JobLine line = parser.parse(chat(
        R"([{"role":"user","content":[{"type":"text","text":"Hi<|im_end|>"},{"type":"text","text":"!"}]}])"));
    REQUIRE_MESSAGE(!line.error, line.error->message);
    CHECK(line.request.prompt ==
          "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>!<|im_end|>\n"
          "<|im_start|>assistant\n");
    const TokenId end = chat_tokenizer()->find("<|im_end|>");
    CHECK(std::count(line.request.prompt_ids.begin(), line.request.prompt_ids.end(), end) == 2);

    Parser plain;
    const auto code = [&](const std::string& messages) {
        return plain.body_code(R"({"messages":)" + messages + "}", "", "/v1/chat/completions");
    };
    CHECK(code(R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])").empty());
    CHECK(code("[]") == "invalid_value");
    CHECK(code("\"secret\"") == "invalid_type");
    CHECK(code("[7]") == "invalid_type");
    CHECK(code(R"([{"role":"tool","content":"secret"}])") == "invalid_value");
    CHECK(code(R"([{"content":"secret"}])") == "missing_field");
    CHECK(code(R"([{"role":"user"}])") == "missing_field");
    CHECK(code(R"([{"role":"user","content":7}])") == "invalid_type");
    CHECK(code(R"([{"role":"user","content":[{"type":"image_url"}]}])") == "unsupported_value");
    CHECK(code(R"([{"role":"user","content":"a","name":"secret"}])") == "unknown_field");
    CHECK(plain.body_code(R"({"prompt":"x"})", "", "/v1/chat/completions") == "missing_field");
    const JobLine asked = plain.parse(
        R"({"custom_id":"l","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"a"}],"logprobs":true}})");
    CHECK(asked.logprobs == 0u);
    CHECK(asked.request.logprobs == 1);
}

TEST_CASE("a tenant is what the named field says, and lines without one share with nobody") {
    const auto line = [](const std::string& id, const std::string& more) {
        return R"({"custom_id":")" + id +
               R"(","method":"POST","url":"/v1/completions","body":{"prompt":"x"})" + more + "}";
    };
    Parser by_field({.tenant_field = "customer"});
    CHECK(by_field.parse(line("a", R"(,"customer":"acme")")).request.tenant == "acme");
    const JobLine alone = by_field.parse(line("b", ""));
    CHECK(alone.request.tenant == "line-2");
    CHECK(alone.request.scope == CacheScope::request);
    CHECK(by_field.code(line("c", R"(,"customer":"ACME")")) == "invalid_tenant");
    CHECK(by_field.code(line("d", R"(,"customer":"line-2")")) == "invalid_tenant");
    CHECK(by_field.code(line("e", R"(,"customer":7)")) == "invalid_type");
    CHECK(by_field.code(line("f", R"(,"tenant":"acme")")) == "tenant_not_allowed");
    CHECK(by_field.parse(line("g", R"(,"customer":"line-up")")).request.tenant == "line-up");
    Parser given({.tenant = "acme", .tenant_field = "tenant"});
    CHECK(given.parse(line("a", "")).request.tenant == "acme");
    CHECK(given.parse(line("b", R"(,"tenant":"zeta")")).request.tenant == "zeta");
}

TEST_CASE("a seed depends on the job's, the custom_id and the line, and on nothing else") {
    const std::string text =
        R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}})";
    Parser first, second;
    second.parse("{}");
    const std::uint64_t seed = first.parse(text).request.sampling.seed;
    CHECK(second.parse(text).request.sampling.seed == seed);
    CHECK(Parser({.sampling = {.seed = 1}}).parse(text).request.sampling.seed != seed);
    CHECK(Parser().parse(text + " ").request.sampling.seed != seed);
    CHECK(derived_seed(0, "a", sha256(text)) == seed);
    CHECK(derived_seed(0, "b", sha256(text)) != seed);
    Parser own;
    CHECK(
        own.parse(
               R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x","seed":7}})")
            .request.sampling.seed == 7);
}

TEST_CASE("only a stream has cancel lines") {
    Parser stream({}, true);
    CHECK(stream.parse(R"({"cancel":"a"})").cancels == "a");
    CHECK(stream.code(R"({"cancel":7})") == "invalid_type");
    CHECK(stream.code(R"({"cancel":"a","custom_id":"b"})") == "missing_field");
}
