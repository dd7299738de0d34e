// Runs of calls in C++ (native.py): operators one after another, on values in slots.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using Places = std::vector<int64_t>;

constexpr int64_t CONSTANT = -1, LIST = -2;

struct Call {
  c10::OperatorHandle op;
  std::string label;
  Places places;  // of arguments: a slot, CONSTANT, or LIST - n before the n places of a list
  std::vector<IValue> constants;
  Places results, drops;

  // A list of tensors, whose places begin at `at`.
  template <class T>
  IValue list(const std::vector<IValue>& slots, const int64_t* at, int64_t count) const {
    c10::List<T> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(at[i] == CONSTANT ? T() : T(slots[at[i]].toTensor()));
    return made;
  }

  void run(std::vector<IValue>& slots, std::vector<IValue>& stack) const {
    stack.clear();
    const auto& arguments = op.schema().arguments();
    auto constant = constants.begin();
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t place = places[i];
      if (place >= 0) {
        stack.push_back(slots[place]);
      } else if (place == CONSTANT) {
        stack.push_back(*constant++);
      } else {
        const auto& element = arguments[stack.size()].type()->expectRef<c10::ListType>().getElementType();
        const bool optional = element->kind() == c10::TypeKind::OptionalType;
        stack.push_back(optional ? list<std::optional<at::Tensor>>(slots, &places[i + 1], LIST - place)
                                 : list<at::Tensor>(slots, &places[i + 1], LIST - place));
        i += LIST - place;
      }
    }
    op.callBoxed(stack);
    for (size_t i = 0; i < results.size(); ++i) slots[results[i]] = std::move(stack[i]);
    for (const int64_t slot : drops) slots[slot] = IValue();
  }
};

// Calls that are added once and executed many times.
struct Run : torch::CustomClassHolder {
  int64_t count;  // of slots
  std::vector<Call> calls;

  explicit Run(int64_t slots) : count(slots) {}

  // drops: slots that are not read afterwards.
  void add(std::string name, std::string overload, std::string label, Places places, c10::List<IValue> constants,
           Places results, Places drops) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    calls.push_back({op, label, places, {constants.begin(), constants.end()}, results, drops});
  }

  // inputs: of the first slots. Returns the values of the slots `outputs`.
  std::vector<at::Tensor> execute(std::vector<at::Tensor> inputs, Places outputs) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<IValue> slots(count), stack;
    std::move(inputs.begin(), inputs.end(), slots.begin());
    for (const Call& call : calls) {
      try {
        call.run(slots, stack);
      } catch (c10::Error& error) {
        error.add_context(call.label);
        throw;
      }
    }
    std::vector<at::Tensor> found;
    for (const int64_t slot : outputs) found.push_back(slots[slot].toTensor());
    return found;
  }
};

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.class_<Run>("Run").def(torch::init<int64_t>()).def("add", &Run::add).def("execute", &Run::execute);
}

}  // namespace
