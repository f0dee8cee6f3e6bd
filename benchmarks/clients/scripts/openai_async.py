"""The asynchronous client of the `openai` package, eight calls at a time: BASE_URL KEY MODEL."""

import asyncio
import sys

import openai

base_url, key, model = sys.argv[1:]


async def ask(client, number):
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Count to {number}."}],
        max_tokens=12,
        stream=True,
        seed=number,
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    whole = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, timeout=60
    )
    assert whole.choices[0].finish_reason in ("stop", "length")
    return text


async def main():
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
        assert all(await asyncio.gather(*(ask(client, number) for number in range(1, 9))))
        stream = await client.completions.create(model=model, prompt="One, two,", max_tokens=500, stream=True)
        async for _ in stream:
            break
        await stream.close()  # leaves early, as a user who has seen enough


asyncio.run(main())
print(f"content: openai {openai.__version__}")
