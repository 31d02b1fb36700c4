#include "src/jobs/json_text.h"

#include <utility>
#include <vector>

namespace kvw {

namespace {

using Json = nlohmann::json;

// Builds the value while it is parsed, so that what is refused never becomes one.
class Builder {
  public:
    // The interface that Json::sax_parse asks for; false stops it.
    bool null() { return put(nullptr) != nullptr; }
    bool boolean(bool value) { return put(value) != nullptr; }
    bool number_integer(std::int64_t value) { return put(value) != nullptr; }
    bool number_unsigned(std::uint64_t value) { return put(value) != nullptr; }
    bool number_float(double value, const std::string&) { return put(value) != nullptr; }
    bool string(std::string& value) { return put(std::move(value)) != nullptr; }
    bool binary(Json::binary_t&) { return false; }
    bool start_object(std::size_t) { return open(Json::object()); }
    bool start_array(std::size_t) { return open(Json::array()); }
    bool end_object() { return close(); }
    bool end_array() { return close(); }
    bool key(std::string& name) {
        if (open_.back()->contains(name)) {
            problem_ = "a name occurs twice in one object";
            return false;
        }
        name_ = std::move(name);
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const Json::exception&) {
        problem_ =
            "it is not JSON from byte " + std::to_string(position == 0 ? 0 : position - 1) + " on";
        return false;
    }

    Json value_;
    std::string problem_;

  private:
    Json* put(Json value) {
        if (open_.empty()) {
            value_ = std::move(value);
            return &value_;
        }
        Json& parent = *open_.back();
        if (parent.is_array()) {
            parent.push_back(std::move(value));
            return &parent.back();
        }
        return &(parent[name_] = std::move(value));
    }
    bool open(Json value) {
        if (open_.size() == kJsonDepthMax) {
            problem_ = "it is nested deeper than " + std::to_string(kJsonDepthMax) + " levels";
            return false;
        }
        // The place stays where it is while it is open: only its own children are added meanwhile.
        open_.push_back(put(std::move(value)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return true;
    }

    std::vector<Json*> open_;
    std::string name_;
};

}  // namespace

JsonText parse_json(std::string_view text) {
    if (text.starts_with("\xef\xbb\xbf")) {
        return {nullptr, "it begins with a byte order mark"};
    }
    Builder builder;
    const bool parsed = Json::sax_parse(text.begin(), text.end(), &builder);
    if (!parsed && builder.problem_.empty()) {
        builder.problem_ = "it is not JSON";
    }
    return {std::move(builder.value_), std::move(builder.problem_)};
}

}  // namespace kvw
