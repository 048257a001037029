// The traffic of the last minutes, asked for every few seconds while the page is seen.

import { useState } from "./lib/preact.js";
import { call } from "./api.js";
import { usePolling } from "./polling.js";

const EVERY_MS = 5000;
const NOTHING = { services: {}, problem: "", step_s: 5, at: 0 };

export function useTraffic(minutes, isLive) {
  const [traffic, setTraffic] = useState(NOTHING);
  const ask = () =>
    isLive ? call("GET", `/api/v1/traffic?minutes=${minutes}`).catch((error) => ({ ...NOTHING, problem: error.message })) : null;
  usePolling(ask, setTraffic, EVERY_MS, isLive, [minutes, isLive]);
  return traffic;
}
