"""OpenAI's request bodies, with vLLM's extras, and what they mean to the engine."""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.server.protocol.messages import Message
from jaxserve.server.protocol.structured import (
    ResponseFormat,
    StructuredOutputs,
    structured_outputs,
)
from jaxserve.server.protocol.tools import (
    NamedToolChoice,
    ToolChoice,
    Tools,
    arguments_schema,
    calls_schema,
    find_function,
)

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_DETOKENIZED = 1 << 22
DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat answer goes on to the model's limit."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


def _check_prompt(value: Any) -> Any:
    """pydantic would try each element against each type, which takes seconds for a long prompt."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return value
        if kinds == {str} or (kinds == {list} and set(map(type, chain(*value))) == {int}):
            if len(value) > MAX_PROMPTS:
                raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, got {len(value)}")
            return value
    raise ValueError("must be a string, a list of strings, or one or several lists of token ids")


_TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _token_ids(least: int, most: int) -> Any:
    """The type of a list of so many token ids, checked all at once for the same reason."""

    def check(value: Any) -> Any:
        if not isinstance(value, list) or set(map(type, value)) - {int}:
            raise ValueError("must be a list of token ids")
        if value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
            raise ValueError(f"must be token ids from 0 to {MAX_TOKEN_ID}")
        if not least <= len(value) <= most:
            raise ValueError(f"must have a length of {least} to {most}, got {len(value)}")
        return value

    declared = Annotated[list[TokenId], Field(min_length=least, max_length=most)]
    return Annotated[list[TokenId], PlainValidator(check, json_schema_input_type=declared)]


_Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)
Prompt = Annotated[_Prompt, PlainValidator(_check_prompt, json_schema_input_type=_Prompt)]


def _check_num_biases(value: Any) -> Any:
    """pydantic would look at each of them first."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"must have a length of at most {MAX_LOGIT_BIASES}, got {len(value)}")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    unsupported: ClassVar[Mapping[str, object]] = {}
    """Known fields that are not built, and the value that asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, neutral in cls.unsupported.items():
                if data.get(name) not in (None, neutral):
                    raise ValueError(f"{name} is not supported")
        return data


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _SamplingBody(_Body):
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_check_num_biases),
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _token_ids(0, MAX_STOP_TOKEN_IDS) | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: _token_ids(1, MAX_ALLOWED_TOKEN_IDS) | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> "_SamplingBody":
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    @property
    def grammar_field(self) -> str | None:
        """What the answer's grammar comes from; None: it has none."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    def _params(self, **chosen: Any) -> SamplingParams:
        fields = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias is not None:
            fields["logit_bias"] = _token_biases(self.logit_bias)
        fields["structured_outputs"] = structured_outputs(
            self.response_format, self.structured_outputs
        )
        return SamplingParams(**fields | chosen)


_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "allowed_token_ids", "bad_words",
)  # fmt: skip


def _token_biases(value: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) > MAX_TOKEN_ID:
            raise ValueError(f"logit_bias must have token ids as keys, got {key[:40]!r}")
        if int(key) in biases:
            raise ValueError(f"logit_bias has token id {int(key)} more than once")
        biases[int(key)] = bias
    return biases


class CompletionRequest(_SamplingBody):
    unsupported = {"suffix": "", "best_of": 1}

    prompt: Prompt
    max_tokens: Count | None = None
    """0, with echo, is for the prompt's log-probabilities alone."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    add_special_tokens: bool = True

    @property
    def drops_output(self) -> bool:
        """The prompt and its log-probabilities are all that is asked for."""
        return self.max_tokens == 0

    def to_params(self) -> SamplingParams:
        """ValueError, beginning with a field's name, for what cannot be."""
        if self.drops_output and not self.echo:
            raise ValueError("max_tokens must be at least 1 (0 needs echo=true)")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)
        chosen = {"max_tokens": max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            chosen["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self._params(**chosen)

    def prompts(self) -> dict[str, str | list[int]]:
        """By their places in the body."""
        if isinstance(self.prompt, str) or type(self.prompt[0]) is int:
            return {"prompt": self.prompt}
        return {f"prompt[{i}]": prompt for i, prompt in enumerate(self.prompt)}


class _ChatBody(_Body):
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    add_generation_prompt: bool | None = None
    """None: unless the last message is to be continued."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @model_validator(mode="after")
    def _check_end(self) -> "_ChatBody":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs an assistant's message at the end")
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def tool_definitions(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None, as it wants to see it, if there are none."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return variables | (self.chat_template_kwargs or {})


class ChatCompletionRequest(_ChatBody, _SamplingBody):
    unsupported = {"functions": [], "function_call": "none", "chat_template": ""}

    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    tool_choice: ToolChoice | None = None
    """None: "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    include_reasoning: bool = True

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(
        cls, choice: ToolChoice | None, info: ValidationInfo
    ) -> ToolChoice | None:
        if choice in (None, "none") or "tools" not in info.data:
            return choice
        if not info.data["tools"]:
            raise ValueError("needs tools to choose from")
        if isinstance(choice, NamedToolChoice):
            find_function(info.data["tools"], choice)
        return choice

    @property
    def parses_tools(self) -> bool:
        """The model decides whether to call functions, in a style of its own."""
        return bool(self.tools) and self.tool_choice in (None, "auto")

    @property
    def names_function(self) -> bool:
        """The client has chosen the one function to call."""
        return isinstance(self.tool_choice, NamedToolChoice)

    @property
    def grammar_field(self) -> str | None:
        return super().grammar_field if self.tool_choice in (None, "none", "auto") else "tools"

    @property
    def max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    def to_params(self) -> SamplingParams:
        """ValueError, beginning with a field's name, for what cannot be."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        chosen: dict[str, Any] = {
            "max_tokens": limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        if (constraint := self._calls_constraint()) is not None:
            chosen["structured_outputs"] = constraint
        return self._params(**chosen)

    def _calls_constraint(self) -> StructuredOutputsParams | None:
        """What holds the answer to calls, if it must hold some. `response_format` is for content,
        and there is none then."""
        if self.tool_choice in (None, "none", "auto"):
            return None
        if self.structured_outputs is not None and self.structured_outputs.to_params() is not None:
            raise ValueError("structured_outputs and a tool_choice of calls exclude each other")
        try:
            if isinstance(self.tool_choice, NamedToolChoice):
                schema = arguments_schema(find_function(self.tools, self.tool_choice))
            else:
                schema = calls_schema(self.tools, self.max_calls)
            # Free white space is where small models lose themselves.
            return StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
        except ValueError as error:
            raise ValueError(f"tools make no grammar: {error}") from error


class TokenizeTextRequest(_Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(_ChatBody):
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: _token_ids(0, MAX_DETOKENIZED)
