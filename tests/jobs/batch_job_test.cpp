#include "src/jobs/answer_check.h"
#include "tests/jobs/job_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// Good lines and one of each kind of bad ones.
std::string mixed_input() {
    std::string text = "\xef\xbb\xbf" + asks("a", "The first");
    text += "not JSON\n";
    text += asks("b", "The second", 6, {{"body", {{"logprobs", 2}}}});
    text += "\n";
    text += asks("a", "The first again");
    text += asks("long", std::string(2000, 'x'));
    text += asks("c", "Third\xf0\x9f\x98\x80", 9);
    text.insert(text.size() - 1, "\r");
    text += "{\"custom_id\":\"\xff\"}\n";
    text += asks("d", "Fourth", 5, {{"body", {{"temperature", 0.7}}}});
    text.pop_back();
    return text;
}

}  // namespace

TEST_CASE("every line has one answer, in order, paired with what it asked") {
    const Folder folder;
    write(folder / "in", mixed_input());
    const Done done = run_job(folder / "in", output_options(folder / "in", folder / "out"), {},
                              folder / "t.kvw.zst");
    const std::vector<Json> lines = lines_of(done.out);
    REQUIRE(lines.size() == 9);
    const std::vector<std::string> codes = {
        "", "invalid_json_line", "", "empty_line", "duplicate_custom_id", "exceed_context_size",
        "", "invalid_utf8",      ""};
    for (std::size_t i = 0; i < lines.size(); ++i) {
        CAPTURE(i);
        const Json& line = lines[i];
        CHECK(line["id"].get<std::string>().ends_with("_" + std::to_string(i + 1)));
        CHECK(line["error"].is_null() == codes[i].empty());
        if (codes[i].empty()) {
            const Json& body = line["response"]["body"];
            CHECK(line["response"]["status_code"] == 200);
            CHECK(body["object"] == "text_completion");
            CHECK(body["created"] == 0);
            CHECK(body["usage"]["total_tokens"].get<int>() ==
                  body["usage"]["prompt_tokens"].get<int>() +
                      body["usage"]["completion_tokens"].get<int>());
            CHECK(body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0);
        } else {
            CHECK(line["error"]["code"] == codes[i]);
            CHECK(line["error"]["message"].get<std::string>().starts_with(
                "line " + std::to_string(i + 1) + ":"));
        }
        CHECK(line["kvwitness"]["online"] == "clean");
    }
    CHECK(lines[5]["response"]["status_code"] == 400);
    CHECK(lines[1]["response"].is_null());
    CHECK(lines[1]["custom_id"].is_null());
    CHECK(lines[4]["custom_id"] == "a");
    const Json& logprobs = lines[2]["response"]["body"]["choices"][0]["logprobs"];
    CHECK(logprobs["tokens"].size() == logprobs["top_logprobs"].size());
    CHECK(logprobs["tokens"].size() == lines[2]["response"]["body"]["usage"]["completion_tokens"]);
    CHECK(done.report.totals.finished == 9);
    CHECK(done.report.totals.failed == 5);
    CHECK(done.report.errors.at("empty_line") == 1);

    const Result<Pairing> pairing = pair_answers(folder / "in", folder / "out", {});
    REQUIRE(pairing);
    CHECK(pairing->complete());
    CHECK(pairing->answered == 4);

    // And every line, malformed ones too, is a submit of the record.
    const Result<AnswerCheck> tied =
        check_answers({folder / "t.kvw.zst"}, folder / "out", folder / "in");
    REQUIRE_MESSAGE(tied, (tied ? "" : tied.error().message));
    for (const AnswerFinding& finding : tied->findings) {
        FAIL_CHECK(finding.detail);
    }
    CHECK(tied->tied == 9);
    CHECK(tied->incomplete.empty());
    CHECK(tied->planted > 0);
    CHECK(tied->caught == tied->planted);
}

TEST_CASE("an answer that was changed, swapped or given to another line is found") {
    const Folder folder;
    write(folder / "in", asks("a", "One", 6, {{"body", {{"temperature", 0.7}}}}) +
                             asks("b", "Two two", 7, {{"body", {{"temperature", 0.7}}}}));
    const Done done = run_job(folder / "in", output_options(folder / "in", folder / "out"), {},
                              folder / "t.kvw.zst");
    std::vector<Json> lines = lines_of(done.out);
    const auto findings = [&](const std::vector<Json>& changed) {
        std::string text;
        for (const Json& line : changed) {
            text += line.dump() + "\n";
        }
        write(folder / "changed", text);
        const auto checked =
            check_answers({folder / "t.kvw.zst"}, folder / "changed", folder / "in");
        REQUIRE_MESSAGE(checked, (checked ? "" : checked.error().message));
        return checked->findings.size() + checked->incomplete.size();
    };
    CHECK(findings(lines) == 0);
    std::vector<Json> swapped = lines;
    std::swap(swapped[0]["response"]["body"], swapped[1]["response"]["body"]);
    CHECK(findings(swapped) > 0);
    std::vector<Json> moments = lines;
    std::swap(moments[0]["kvwitness"]["moment"], moments[1]["kvwitness"]["moment"]);
    CHECK(findings(moments) > 0);
    std::vector<Json> ids = lines;
    std::swap(ids[0]["custom_id"], ids[1]["custom_id"]);
    CHECK(findings(ids) > 0);
    std::vector<Json> counts = lines;
    counts[0]["response"]["body"]["usage"]["prompt_tokens"] = 1;
    CHECK(findings(counts) > 0);
    std::vector<Json> odd = lines;
    odd[0]["response"]["body"]["choices"] = Json{{"0", {{"text", "x"}}}};
    CHECK(findings(odd) > 0);
    odd[0]["kvwitness"] = 7;
    CHECK(findings(odd) > 0);
    CHECK(findings({lines[0]}) > 0);
    CHECK(findings({lines[0], lines[0]}) > 0);
}

TEST_CASE("shards give the lines of the whole, and are merged only when all are there") {
    const Folder folder;
    write(folder / "in", mixed_input());
    const FileOutputOptions options = output_options(folder / "in", folder / "whole");
    const std::string whole = without_moments(run_job(folder / "in", options).out);
    std::vector<Path> shards;
    for (std::uint64_t i = 0; i < 4; ++i) {
        FileOutputOptions part = options;
        part.path = folder / ("part" + std::to_string(i));
        part.shard = {i, 4};
        run_job(folder / "in", part);
        shards.push_back(part.path);
        CHECK(pair_answers(folder / "in", part.path, part.shard)->complete());
        CHECK_FALSE(pair_answers(folder / "in", part.path, {})->complete());
    }
    std::swap(shards[0], shards[2]);
    REQUIRE(merge_shards(shards, folder / "merged", false));
    CHECK(without_moments(contents(folder / "merged")) == whole);
    CHECK(merge_shards(shards, folder / "merged", false).error().code == ErrorCode::file_exists);
    CHECK(merge_shards(shards, folder / "merged", true));
    shards.pop_back();
    CHECK(merge_shards(shards, folder / "m3", false).error().code == ErrorCode::bad_input);
    shards.push_back(shards[0]);
    CHECK(merge_shards(shards, folder / "m3", false).error().code == ErrorCode::bad_input);
}

TEST_CASE("a job that was stopped goes on to the same file") {
    const Folder folder;
    std::string text;
    for (int i = 0; i < 30; ++i) {
        text += i % 7 == 3
                    ? "bad\n"
                    : asks("id" + std::to_string(i), "Prompt " + std::to_string(i), 2 + i % 9);
    }
    write(folder / "in", text);
    FileOutputOptions options = output_options(folder / "in", folder / "whole");
    const std::string whole = without_moments(run_job(folder / "in", options).out);
    options.path = folder / "out";
    int runs = 0;
    std::string before;
    for (bool done = false; !done; ++runs) {
        REQUIRE(runs < 50);
        JobRun run;
        int steps = 0;
        run.context().stop = [&] { return steps >= 12; };
        run.context().after_step = [&]() -> Status {
            ++steps;
            return {};
        };
        options.resume = true;
        auto output = FileOutput::create(options);
        REQUIRE(output);
        const JobReport report = run.batch(folder / "in", **output, options.input);
        REQUIRE_FALSE(report.error);
        done = !report.stopped;
        REQUIRE((*output)->close(done));
        run.finish();
        const std::string out = contents(folder / "out");
        CHECK(out.starts_with(before));  // finished lines keep their bytes, moments included
        before = out;
    }
    CHECK(runs > 2);
    CHECK(without_moments(before) == whole);
}

TEST_CASE("an input that changes under the job is noticed") {
    const Folder folder;
    write(folder / "in", asks("a", "One") + asks("b", "Two"));
    const FileOutputOptions options = output_options(folder / "in", folder / "out");
    write(folder / "in", asks("a", "One") + asks("b", "Owt"));
    JobRun run;
    auto output = FileOutput::create(options);
    REQUIRE(output);
    const JobReport report = run.batch(folder / "in", **output, options.input);
    REQUIRE(report.error);
    CHECK(report.error->code == ErrorCode::file_changed);
}

TEST_CASE("deadlines, quotas and small queues end lines with their own status") {
    const Folder folder;
    std::string text;
    for (int i = 0; i < 12; ++i) {
        text += asks("id" + std::to_string(i), "abcdefgh", i == 5 ? 100 : 4);
    }
    write(folder / "in", text);
    const Done done =
        run_job(folder / "in", output_options(folder / "in", folder / "out"), {.tenant = "acme"},
                {}, {.sequences_max = 2, .queue_max = 1, .quota_rows = 64});
    const auto lines = lines_of(done.out);
    for (std::size_t i = 0; i < lines.size(); ++i) {
        CAPTURE(i);
        CHECK(lines[i]["response"]["status_code"] == (i == 5 ? 429 : 200));
    }
    CHECK(lines[5]["error"]["code"] == "tenant_quota");

    const Done late = run_job(folder / "in", output_options(folder / "in", folder / "late"),
                              {.deadline_ms = [](const std::string&) { return 1; }});
    bool passed = false;
    for (const Json& line : lines_of(late.out)) {
        const int status = line["response"]["status_code"];
        CHECK((status == 200 || status == 408));
        passed |= status == 408;
        CHECK((status == 408) == line["response"]["body"].is_null());
    }
    CHECK(passed);
}
