#include <signal.h>
#include <sys/wait.h>

#include <set>
#include <thread>

#include "tests/jobs/job_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// The two ends of a pipe.
struct Pipe {
    int in = -1, out = -1;  // to write into; to read from
    Pipe() {
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        out = ends[0];
        in = ends[1];
    }
    ~Pipe() {
        close_in();
        close_out();
    }
    void close_in() {
        if (in >= 0) {
            close(std::exchange(in, -1));
        }
    }
    void close_out() {
        if (out >= 0) {
            close(std::exchange(out, -1));
        }
    }
    void say(std::string_view text) const {
        while (!text.empty()) {
            const ssize_t put = ::write(in, text.data(), text.size());
            if (put <= 0) {
                return;
            }
            text.remove_prefix(static_cast<std::size_t>(put));
        }
    }
};

// One line from the pipe, "" at its end.
std::string line_from(int descriptor) {
    std::string line;
    for (char c = 0; ::read(descriptor, &c, 1) == 1;) {
        line += c;
        if (c == '\n') {
            break;
        }
    }
    return line;
}

// The job in a thread of its own, the test as its parent process.
class Stream {
  public:
    explicit Stream(JobOptions options = {}, EngineConfig config = {.sequences_max = 4})
        : run_({}, config), job_([this, options] {
              report = run_stream(run_.context(), options, asks.out, answers.in);
              answers.close_in();
          }) {}
    ~Stream() { end(); }

    std::vector<Json> rest() {
        std::vector<Json> lines;
        for (std::string line; !(line = line_from(answers.out)).empty();) {
            lines.push_back(Json::parse(line));
        }
        return lines;
    }
    // Waits for the job; the record is whole and clean.
    JobReport& end() {
        if (job_.joinable()) {
            job_.join();
            if (!report.engine_stopped) {
                run_.finish();
            }
        }
        return report;
    }
    JobRun& run() { return run_; }

    Pipe asks, answers;
    JobReport report;

  private:
    JobRun run_;
    std::thread job_;
};

int status_of(const Json& line) { return line["response"]["status_code"]; }

}  // namespace

TEST_CASE("lines are answered as they arrive, and the end of the input ends the stream") {
    Stream stream;
    stream.asks.say(asks("a", "Hello"));
    const Json first = Json::parse(line_from(stream.answers.out));
    CHECK(first["custom_id"] == "a");
    CHECK(status_of(first) == 200);
    stream.asks.say("junk\n" + asks("b", "Hello") + asks("a", "again"));
    stream.asks.close_in();
    std::map<std::string, std::string> ends;
    for (const Json& line : stream.rest()) {
        ends[line["id"].get<std::string>().substr(27)] =
            line["error"].is_null() ? "ok" : line["error"]["code"].get<std::string>();
    }
    CHECK(ends == std::map<std::string, std::string>{
                      {"2", "invalid_json_line"}, {"3", "ok"}, {"4", "duplicate_custom_id"}});
    CHECK(stream.end().totals.finished == 4);
}

TEST_CASE("a cancel line ends exactly the request it names, running or waiting") {
    Stream stream({}, {.sequences_max = 1});
    stream.asks.say(asks("long", "Hello", 300) + asks("next", "Hello", 250));
    for (int i = 0; i < 8; ++i) {
        stream.asks.say(asks("wait" + std::to_string(i), "Hello", 200));
    }
    stream.asks.say(asks("kept", "Hello", 3));
    stream.asks.say(R"({"cancel":"wait7"})"
                    "\n"
                    R"({"cancel":"nobody"})"
                    "\n");
    const Json first = Json::parse(line_from(stream.answers.out));
    CHECK(first["custom_id"] == "wait7");
    CHECK(status_of(first) == 499);
    CHECK(first["error"]["code"] == "cancelled");
    for (int i = 0; i < 7; ++i) {
        stream.asks.say("{\"cancel\":\"wait" + std::to_string(i) + "\"}\n");
    }
    stream.asks.say(R"({"cancel":"long"})"
                    "\n"
                    R"({"cancel":"next"})"
                    "\n");
    stream.asks.close_in();
    std::map<std::string, int> ends;
    for (const Json& line : stream.rest()) {
        CHECK(ends.emplace(line["custom_id"], status_of(line)).second);
    }
    CHECK(ends.size() == 10);
    CHECK(ends["kept"] == 200);
    CHECK(ends["wait3"] == 499);
    stream.end();
}

TEST_CASE("a reader that leaves cancels everything") {
    ::signal(SIGPIPE, SIG_IGN);
    Stream stream;
    for (int i = 0; i < 20; ++i) {
        stream.asks.say(asks("id" + std::to_string(i), "Hello", 250));
    }
    stream.answers.close_out();
    const JobReport& report = stream.end();  // although the input is still open
    CHECK(report.reader_gone);
    CHECK(report.totals.finished == 0);
}

TEST_CASE("a stop ends every line once") {
    std::atomic<bool> stop = false;
    Pipe in, out;
    JobRun run;
    run.context().stop = [&] { return stop.load(); };
    JobReport report;
    std::thread job([&] {
        report = run_stream(run.context(), {}, in.out, out.in);
        out.close_in();
    });
    for (int i = 0; i < 12; ++i) {
        in.say(asks("id" + std::to_string(i), "Hello", i == 0 ? 1 : 290));
    }
    line_from(out.out);
    stop = true;
    std::set<std::string> ended;
    for (std::string line; !(line = line_from(out.out)).empty();) {
        CHECK(ended.insert(Json::parse(line)["custom_id"]).second);
    }
    job.join();
    run.finish();
    CHECK(report.stopped);
    CHECK(ended.size() + 1 == report.totals.finished);
}

TEST_CASE("a parent that writes everything before it reads anything is not waited for") {
    Stream stream;
    constexpr int kLines = 300;
    for (int i = 0; i < kLines; ++i) {
        stream.asks.say(asks("id" + std::to_string(i), std::string(200, 'x'), 1));
    }
    stream.asks.close_in();
    std::set<std::string> ended;
    for (const Json& line : stream.rest()) {
        CHECK(ended.insert(line["custom_id"]).second);
    }
    CHECK(ended.size() == kLines);
    stream.end();
}

TEST_CASE("a tenant that sends many lines at once does not keep another out") {
    Stream stream({.tenant_field = "tenant"}, {.sequences_max = 2});
    std::string burst;
    for (int i = 0; i < 60; ++i) {
        burst += asks("many" + std::to_string(i), "Hello", 20, {{"tenant", "many"}});
    }
    stream.asks.say(burst + asks("one", "Hello", 1, {{"tenant", "one"}}));
    stream.asks.close_in();
    const std::vector<Json> lines = stream.rest();
    REQUIRE(lines.size() == 61);
    std::size_t place = 0;
    while (lines[place]["custom_id"] != "one") {
        ++place;
    }
    CHECK(place < 20);
    stream.end();
}
