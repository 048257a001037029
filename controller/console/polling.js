// Asks again and again while the page is seen.

import { useEffect, useRef } from "./lib/preact.js";

// `take` gets each answer of `ask`, unless the `inputs` have changed by then. Without `isRepeated`, it is asked once.
export function usePolling(ask, take, everyMs, isRepeated, inputs) {
  const every = useRef(everyMs);
  every.current = everyMs;
  useEffect(() => {
    let timer = 0;
    const turn = async () => {
      const answer = document.hidden ? null : await ask();
      if (timer === null) return;
      if (answer) take(answer);
      if (isRepeated) timer = setTimeout(turn, every.current);
    };
    turn();
    return () => {
      clearTimeout(timer);
      timer = null;
    };
  }, inputs);
}
