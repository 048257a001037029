// The traffic of the last minutes, asked for every few seconds while the page is seen.

import { useEffect, useState } from "./lib/preact.js";
import { call } from "./api.js";

const EVERY_MS = 5000;
const NOTHING = { services: {}, problem: "", step_s: 5, at: 0 };

export function useTraffic(minutes, isLive) {
  const [traffic, setTraffic] = useState(NOTHING);
  useEffect(() => {
    if (!isLive) return undefined;
    let timer = 0;
    const ask = async () => {
      if (!document.hidden) {
        const found = await call("GET", `/api/v1/traffic?minutes=${minutes}`).catch((error) => ({ ...NOTHING, problem: error.message }));
        if (timer === null) return;
        setTraffic(found);
      }
      timer = setTimeout(ask, EVERY_MS);
    };
    ask();
    return () => {
      clearTimeout(timer);
      timer = null;
    };
  }, [minutes, isLive]);
  return traffic;
}
