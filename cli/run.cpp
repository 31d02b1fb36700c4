// run: one prompt, or a conversation at a prompt line, answered and recorded.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "cli/bench_support.h"
#include "cli/commands.h"
#include "cli/generation.h"
#include "cli/places.h"
#include "cli/prompt_line.h"
#include "cli/serving.h"
#include "cli/signals.h"
#include "src/base/random.h"
#include "src/base/text.h"
#include "src/text/chat.h"

namespace kvw::cli {

namespace {

constexpr std::uint64_t kPromptBytesMax = 64 << 20;

Error usage(std::string message) { return {ErrorCode::usage, std::move(message)}; }

// ---- what was asked

Status check_flags(const RunFlags& flags) {
    if (const Status tenant = check_tenant_name(flags.tenant); !tenant) {
        return tenant;
    }
    if (const Status serving = check_serving_flags(flags, flags, flags); !serving) {
        return serving;
    }
    const int prompts = flags.prompt_argument.has_value() + flags.prompt.has_value() +
                        flags.prompt_file.has_value();
    if (prompts > 1) {
        return usage("one prompt at a time: the argument, -p or -f");
    }
    return {};
}

// True when stdin can bring text: not a terminal, and not a device such as /dev/null.
bool stdin_brings_text() {
    struct stat facts {};
    return fstat(STDIN_FILENO, &facts) == 0 &&
           (S_ISFIFO(facts.st_mode) || S_ISREG(facts.st_mode) || S_ISSOCK(facts.st_mode));
}

Status check_utf8(std::string_view what, std::string_view text) {
    if (const std::optional<std::size_t> bad = first_invalid_utf8(text)) {
        return Error{ErrorCode::bad_input,
                     fmt::format("the {} is not UTF-8: byte {} begins no character", what, *bad)};
    }
    return {};
}

// None: a conversation at the terminal.
Result<std::optional<std::string>> read_prompt(const RunFlags& flags) {
    Result<std::string> text = std::string();
    if (flags.prompt) {
        text = *flags.prompt;
    } else if (flags.prompt_file) {
        text = read_input(*flags.prompt_file, kPromptBytesMax);
    } else if (flags.prompt_argument) {
        text =
            stdin_brings_text() ? read_stdin(kPromptBytesMax) : Result<std::string>(std::string());
        if (text) {
            *text += (text->empty() ? "" : " ") + *flags.prompt_argument;
        }
    } else if (isatty(STDIN_FILENO) == 1) {
        return std::optional<std::string>();
    } else {
        text = read_stdin(kPromptBytesMax);
    }
    if (!text) {
        return text.error();
    }
    if (const Status valid = check_utf8("prompt", *text); !valid) {
        return valid.error();
    }
    return std::optional<std::string>(std::move(*text));
}

// ---- what is asked of it

// The prompt as ids, and as the bytes they were made from.
Result<GenerateRequest> make_request(const RunFlags& flags, const Serving& serving,
                                     const std::vector<ChatMessage>& messages) {
    GenerateRequest request{.tenant = flags.tenant,
                            .tokens_max = flags.tokens_max,
                            .sampling = flags.sampling,
                            .top_logits = flags.top_logits,
                            .session = flags.session,
                            .deadline_ms = flags.deadline_ms_of(flags.tenant)};
    const Tokenizer& tokenizer = *serving.loaded.tokenizer;
    if (serving.chat) {
        Result<std::string> rendered = serving.chat->render(messages, true);
        Result<std::vector<TokenId>> ids = serving.chat->encode(tokenizer, messages, true);
        if (!rendered || !ids) {
            return rendered ? ids.error() : rendered.error();
        }
        request.prompt = std::move(*rendered);
        request.prompt_ids = std::move(*ids);
        return request;
    }
    request.prompt = messages.back().content;
    Result<std::vector<TokenId>> ids = tokenizer.encode(request.prompt, SpecialTokens::parse);
    if (!ids) {
        return ids.error();
    }
    request.prompt_ids = std::move(*ids);
    if (tokenizer.adds_bos() && tokenizer.bos() >= 0) {
        request.prompt_ids.insert(request.prompt_ids.begin(), tokenizer.bos());
    }
    return request;
}

// ---- what is said about it

std::string_view finish_name(const Generated& made) {
    if (made.finish) {
        return name_of(*made.finish);
    }
    return made.error && made.error->code == ErrorCode::violation ? "violation" : "error";
}

// The exit status of one request whose trace is closed, or of the failure to close it.
int status_of(const Generated& made, const Serving& serving, const Session& session,
              const Result<TraceTotals>& totals) {
    int status = totals ? 0 : exit_code(totals.error().code);
    if (made.error) {
        const bool goes_on = made.error->code == ErrorCode::violation && !made.engine_stopped;
        status = worse_exit(status, goes_on ? 1 : exit_code(made.error->code));
    } else if (serving.violated()) {
        status = worse_exit(status, 1);
    }
    if (status != 0) {
        return status;
    }
    if (stop_signal() != 0) {
        return 128 + stop_signal();
    }
    return session.out.broken() ? session.out.exit_status() : 0;
}

Error error_for(int status, const Generated& made, const Session& session,
                const Result<TraceTotals>& totals) {
    if (made.error) {
        return *made.error;
    }
    if (!totals) {
        return totals.error();
    }
    if (status > 128) {
        return {ErrorCode::cancelled, "stopped by a signal"};
    }
    if (session.out.broken()) {
        return session.out.error();
    }
    return {ErrorCode::violation,
            "a row was read by a request that did not write it; `verify` names it"};
}

Json ids_array(const std::vector<TokenId>& ids) { return Json(ids); }

Json envelope(const RunFlags& flags, const Serving& serving, const Generated& made,
              const Session& session, const Result<TraceTotals>& totals, int status) {
    Json object = session.object();
    object["model"] = {{"name", serving.loaded.identity.name},
                       {"sha256", hex(serving.loaded.identity.sha256)}};
    object["tenant"] = flags.tenant;
    object["request"] = made.request;
    object["prompt_tokens"] = made.prompt_ids.size();
    object["cached_tokens"] = made.facts.cached_tokens;
    object["completion_tokens"] = made.ids.size();
    object["prompt_ids"] = ids_array(made.prompt_ids);
    object["ids"] = ids_array(made.ids);
    const bool withheld = made.refused || finish_name(made) == "violation";
    if (!withheld) {
        put_text(object, made.text);
    }
    if (!made.refused) {
        object["finish_reason"] = finish_name(made);
    }
    object["seed"] = std::to_string(flags.sampling.seed);
    object["timings"] = {{"load_ms", rounded(serving.loaded.load_ms, 2)},
                         {"ttft_ms", rounded(made.ttft_ms, 2)},
                         {"prefill_tps", rounded(made.prefill_tps, 2)},
                         {"decode_tps", rounded(made.decode_tps, 2)}};
    object["device"] = serving.loaded.device();
    object["isa"] = serving.loaded.kernels->isa;
    object["class"] = "P";
    object["digest"] = {
        {"logits", fmt::format("{:016x}{:016x}", made.facts.logits.a, made.facts.logits.b)},
        {"ledger", totals ? Json(hex(totals->ledger_digest)) : Json(nullptr)}};
    const std::optional<Path> trace = serving.recording->trace();
    object["trace"] = trace ? Json(trace->string()) : Json(nullptr);
    const auto moment_of = [&](std::uint64_t event) {
        return trace && event != 0 ? Json(moment(serving.recording->run_hex(), event))
                                   : Json(nullptr);
    };
    object["moment"] = moment_of(made.facts.last_event);
    object["moments"] = {{"first", moment_of(made.facts.first_event)},
                         {"last", moment_of(made.facts.last_event)}};
    if (flags.top_logits > 0) {
        object["first_logits"] = Json::array();
        for (const TopLogit& top : made.first_logits) {
            object["first_logits"].push_back({{"id", top.id}, {"logit", top.logit}});
        }
    }
    if (status != 0) {
        object["error"] = error_object(error_for(status, made, session, totals), status);
    }
    return object;
}

void say_closing_line(const Serving& serving, const Generated& made, const Session& session) {
    session.note(fmt::format("[{} + {} tokens, {}; prefill {:.0f} t/s, decode {:.1f} t/s; {}]",
                             made.prompt_ids.size(), made.ids.size(), finish_name(made),
                             made.prefill_tps, made.decode_tps, where_the_trace_is(serving)));
}

void say_settings(const RunFlags& flags, const Serving& serving, const Session& session) {
    if (session.common.verbose) {
        const EngineConfig& config = serving.engine->config();
        session.note(fmt::format(
            "[{}; seed {}, {}, {} threads, context {}, pool {} rows, {} rows a step; run {}]",
            serving.loaded.identity.name, flags.sampling.seed, serving.loaded.kernels->isa,
            serving.loaded.threads->threads(), config.context, config.pool_rows, config.batch_rows,
            serving.recording->run_hex()));
    }
}

// ---- one prompt

Result<int> answer_once(const RunFlags& flags, const std::string& prompt, Session& session) {
    Progress progress(session);
    Result<Serving> serving = start_serving(flags, flags, flags, session, progress);
    if (!serving) {
        return serving.error();
    }
    say_settings(flags, *serving, session);
    std::vector<ChatMessage> messages;
    if (flags.system) {
        messages.push_back({"system", *flags.system});
    }
    messages.push_back({"user", prompt});
    Result<GenerateRequest> request = make_request(flags, *serving, messages);
    if (!request) {
        serving->recording->discard();
        return request.error();
    }
    Generated made = generate(*serving->engine, std::move(*request), session, progress);
    if (made.refused && !made.error->limit && exit_code(made.error->code) != 5) {
        serving->recording->discard();  // not a request that the engine knows: nothing was recorded
        return *made.error;
    }
    if (made.refused) {
        made.request = "1";
        made.facts.first_event = made.facts.last_event = serving->engine->events_noted();
    }
    const Result<TraceTotals> totals = stop_serving(*serving, made.engine_stopped, session);
    if (!made.refused && !made.engine_stopped) {
        made.facts = serving->engine->facts(RequestId{std::stoull(made.request)});
    }
    const int status = status_of(made, *serving, session, totals);
    if (session.machine()) {
        session.out.object(envelope(flags, *serving, made, session, totals, status));
    }
    const bool quiet_end = status == 141 || status > 128;
    if (status != 0 && !quiet_end) {
        session.say(error_for(status, made, session, totals).message);
    }
    if (!made.refused && !session.machine() && status != 141) {
        say_closing_line(*serving, made, session);
    }
    // The object itself may have met a full disk.
    return status == 0 && session.out.broken() ? session.out.exit_status() : status;
}

// ---- a conversation

constexpr const char* kChatHelp =
    "/trace   where this run is recorded\n"
    "/clear   forget the conversation so far\n"
    "/bye     end (also Ctrl-D); Ctrl-C stops an answer\n"
    "\"\"\"      begins and ends a text of several lines";

class Conversation {
  public:
    Conversation(const RunFlags& flags, Serving& serving, Session& session)
        : flags_(flags), serving_(serving), session_(session) {
        clear();
    }

    // Answers one line; false when the engine has stopped.
    bool turn(const std::string& line) {
        if (const Status valid = check_utf8("line", line); !valid) {
            session_.say(valid.error().message);
            return true;
        }
        messages_.push_back({"user", line});
        Result<GenerateRequest> request = make_request(flags_, serving_, messages_);
        if (!request) {
            session_.say(request.error().message);
            messages_.pop_back();
            return true;
        }
        Progress progress(session_);
        last_ = generate(*serving_.engine, std::move(*request), session_, progress);
        if (last_.error) {
            session_.say(last_.error->message + (last_.refused ? "; /clear begins anew" : ""));
            messages_.pop_back();
        } else {
            messages_.push_back({"assistant", last_.text});
        }
        if (last_.engine_stopped || (last_.refused && exit_code(last_.error->code) == 5)) {
            return false;
        }
        // Records the end of this answer now rather than with the next one.
        if (const Result<std::vector<Output>> settled = serving_.engine->step(); !settled) {
            last_.error = settled.error();
            last_.engine_stopped = true;
            session_.say(settled.error().message);
            return false;
        }
        return true;
    }

    void clear() {
        messages_.clear();
        if (flags_.system) {
            messages_.push_back({"system", *flags_.system});
        }
    }

    const Generated& last() const { return last_; }

  private:
    const RunFlags& flags_;
    Serving& serving_;
    Session& session_;
    std::vector<ChatMessage> messages_;
    Generated last_;
};

// A signal at the prompt or during an answer: Ctrl-C ends only the answer.
bool asked_to_leave() {
    const int signal_number = stop_signal();
    if (signal_number == SIGINT) {
        forget_stop_signal();
        return false;
    }
    return signal_number != 0;
}

Result<int> converse(const RunFlags& flags, Session& session) {
    if (session.machine()) {
        return usage("no prompt: give it as argument, with -p, -f or on stdin");
    }
    Progress progress(session);
    Result<Serving> serving = start_serving(flags, flags, flags, session, progress);
    if (!serving) {
        return serving.error();
    }
    say_settings(flags, *serving, session);
    session.note(fmt::format("{}; /help lists the commands", serving->loaded.identity.name));
    const Result<Path> state = state_folder();
    PromptLine prompt(flags.no_history || !state ? std::nullopt
                                                 : std::optional<Path>(*state / "history"));
    Conversation conversation(flags, *serving, session);
    bool goes_on = true;
    while (goes_on && !session.out.broken()) {
        const std::optional<std::string> line = prompt.read();
        if (!line && stop_signal() == SIGINT) {
            forget_stop_signal();
            session.note("\n/bye or Ctrl-D ends");
            continue;
        }
        if (!line || *line == "/bye") {
            break;
        }
        if (*line == "/help") {
            session.note(kChatHelp);
        } else if (*line == "/clear") {
            conversation.clear();
        } else if (*line == "/trace") {
            session.note(fmt::format("{}, run {}, {} events", where_the_trace_is(*serving),
                                     serving->recording->run_hex(),
                                     serving->engine->events_noted()));
        } else if (line->starts_with('/') && line->find(' ') == std::string::npos) {
            session.note(fmt::format("no command {}; /help lists them", *line));
        } else if (!line->empty()) {
            goes_on = conversation.turn(*line) && !asked_to_leave();
        }
    }
    const Result<TraceTotals> totals =
        stop_serving(*serving, conversation.last().engine_stopped, session);
    session.note(fmt::format("[{}]", where_the_trace_is(*serving)));
    const int status = status_of(conversation.last(), *serving, session, totals);
    if (!totals) {
        session.say(totals.error().message);
    }
    return status == 7 || status == 5 || status > 128 ? status : 0;
}

Result<int> run(const RunFlags& asked, Session& session) {
    RunFlags flags = asked;
    // Greedy answers draw nothing: without a seed they leave the same record every time.
    flags.sampling.seed = asked.seed.value_or(asked.sampling.temperature == 0.0f ? 0 : entropy64());
    if (const Status checked = check_flags(flags); !checked) {
        return checked.error();
    }
    if (const Status checked = check_trace_places(flags); !checked) {
        return checked.error();
    }
    if (const Status model = check_model(flags.model); !model) {
        return model.error();
    }
    if (flags.key_dir) {
        session.note("text is recorded plain (--text plain): nothing in the key folder is used");
    }
    const Result<std::optional<std::string>> prompt = read_prompt(flags);
    if (!prompt) {
        return prompt.error();
    }
    finish_steps_on_signal(true);
    return *prompt ? answer_once(flags, **prompt, session) : converse(flags, session);
}

}  // namespace

void add_run(Commands& commands) {
    const auto run_flags = std::make_shared<RunFlags>();
    RunFlags& run = *run_flags;
    Flags flags = commands.add(
        {"run", "run", "answer a prompt, or talk at a prompt line; every page event is recorded",
         "  kvwitness run \"Why is the sky blue?\"\n"
         "  kvwitness run -m model.gguf -f prompt.txt -n 200 --temp 0 --json\n"
         "  git diff | kvwitness run \"Summarise this change\"\n"
         "  kvwitness run --raw -p \"Once upon a time\" -s 7 --trace story.kvw.zst\n"
         "  kvwitness run                              a conversation"},
        [run_flags](Session& session) { return cli::run(*run_flags, session); });
    flags.group("Prompt")
        .positional("PROMPT", run.prompt_argument,
                    "The prompt; what comes on stdin is put before it")
        .text("-p,--prompt", "TEXT", run.prompt, "The prompt", false)
        .text("-f,--file", "FILE", run.prompt_file, "Read the prompt from FILE; - is stdin", false)
        .flag("--jsonl", commands.common().jsonl, "One line per token, then the object of --json",
              false)
        .whole("--top-logits", run.top_logits, 1, 100000,
               "Report that many of the first token's logits (--json)")
        .flag("--no-history", run.no_history, "Keep no history of the prompt line");
    add_template_flags(flags, run);
    add_generation_flags(flags, run);
    add_engine_flags(flags, run);
    add_trace_flags(flags, run);
}

}  // namespace kvw::cli
