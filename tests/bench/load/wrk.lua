-- wrk's script: the user ids of the DLRM's requests, and the result as one line of JSON.
-- Arguments after "--": "users" to put ids 1 to 1000, in an order of their own, into {user_id} of the path.

-- WATCH=0: the peer then starts no task that watches for the client going away. Ours watches either way.
if os.getenv("BENCH_WATCH") == "0" then wrk.headers["x-request-disconnect-disabled"] = "?1" end

function init(arguments)
  if arguments[1] ~= "users" then return end
  local ready, place = {}, 0
  for user = 1, 1000 do
    ready[user] = wrk.format(nil, (wrk.path:gsub("{user_id}", tostring(user))))
  end
  function request()
    place = (place + 387) % 1000 -- 387 and 1000 have no common divisor: each id comes once in 1000 requests
    return ready[place + 1]
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "bytes": %d, "p50_ms": %.3f, "p90_ms": %.3f, "p99_ms": %.3f, "p999_ms": %.3f, '
      .. '"max_ms": %.3f, "errors": {"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}}\n',
    summary.requests, summary.duration / 1e6, summary.bytes,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3,
    latency:percentile(99.9) / 1e3, latency.max / 1e3,
    errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
