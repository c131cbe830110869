-- The decisions of job_submit.lua and cli_filter.lua: who shares a GPU, and what such a job asks for instead. Pure.
local kiwi = {}

-- Returns whether jobs of partition `name` (nil: the default one) share GPUs. A list counts if all of it shares.
function kiwi.shares(settings, name)
  local found = false
  for word in (name or settings.default_partition):gmatch("[^,]+") do
    if not settings.partitions[word] then return false end
    found = true
  end
  return found
end

-- Returns the name of the resource in a word like "gres:gpu:a100:2", "gres/gpu=2" or "gpu".
local function resource(word)
  return (word:gsub("^gres[:/]", ""):match("^[^:=]+"))
end

-- Returns whether a request like "gres:gpu:1,license:x" names a GPU.
function kiwi.names_gpu(request)
  for word in (request or ""):gmatch("[^,]+") do
    if resource(word) == "gpu" then return true end
  end
  return false
end

-- Returns `request` with one `instead` in place of its GPUs; what else it names stays.
function kiwi.with_part(request, instead)
  local words = { instead }
  for word in (request or ""):gmatch("[^,]+") do
    local name = resource(word)
    if name ~= "gpu" and name ~= resource(instead) then words[#words + 1] = word end
  end
  return table.concat(words, ",")
end

-- Returns the MB of RAM of a job that shares a GPU: its program's, and room for all GPU memory.
function kiwi.ram_mb(settings)
  return settings.gpu_mb + settings.program_mb
end

return kiwi
