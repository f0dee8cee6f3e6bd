"""The synchronous client of the `openai` package: BASE_URL KEY MODEL."""

import sys

import openai

base_url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key)
question = [{"role": "user", "content": "Name three rivers."}]

assert model in [m.id for m in client.models.list()]
whole = client.chat.completions.create(model=model, messages=question, max_tokens=16, temperature=0)
assert whole.choices[0].message.content and whole.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model=model,
        messages=question,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert streamed and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

with client.chat.completions.stream(model=model, messages=question, max_completion_tokens=8) as stream:
    events = [event.type for event in stream]
    assert "content.delta" in events and "chunk" in events

texts = client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=4, n=2)
assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]

for wrong, kind in (
    ({"model": "no-such-model"}, openai.NotFoundError),
    ({"temperature": 9}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{"model": model, "messages": question, **wrong})
        raise SystemExit(f"{wrong} was not refused")
    except kind as error:
        assert error.code and error.body["message"]
try:
    openai.OpenAI(base_url=f"{base_url}/v1", api_key="wrong").models.list()
    raise SystemExit("a wrong key was not refused")
except openai.AuthenticationError:
    pass
print(f"content: openai {openai.__version__}")
