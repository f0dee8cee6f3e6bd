"""LangChain's OpenAI chat model, called, streamed, in a batch and asynchronously: BASE_URL KEY MODEL."""

import asyncio
import sys
from importlib.metadata import version

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

base_url, key, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{base_url}/v1", api_key=key, max_tokens=16, temperature=0)
history = [
    SystemMessage("You are brief."),
    HumanMessage("Hello"),
    AIMessage("Hello!"),
    HumanMessage([{"type": "text", "text": "Name a river."}]),
]
answer = chat.invoke(history)
assert answer.content and answer.usage_metadata["output_tokens"]
assert answer.response_metadata["finish_reason"] in ("stop", "length")
chunks = list(chat.stream("Hello", stream_usage=True))
assert any(chunk.usage_metadata for chunk in chunks)
assert "".join(chunk.content for chunk in chunks)
assert len(chat.batch(["One", "Two", "Three"])) == 3
assert asyncio.run(chat.ainvoke("Hello")).content
print(f"content: langchain-openai {version('langchain-openai')}")
