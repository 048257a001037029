"""Not here: importing it says why."""

raise ImportError("pierhead.rayserve.llm: language models are services of their own: see the guide of language models")
