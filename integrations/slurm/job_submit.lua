-- Slurm's job_submit plugin (JobSubmitPlugins=lua), on the controller. In a partition that shares GPUs through Kiwi, a
-- job that asks for a GPU gets a part of one, and RAM for the memory that Kiwi moves out of the GPU: that counts in the
-- job's cgroup. A site with a script of its own calls kiwi_job from it.
local directory = "/etc/slurm/"
local kiwi = dofile(directory .. "kiwi_slurm.lua")
local settings = dofile(directory .. "kiwi_settings.lua")

local WHOLE_JOB = { "tres_per_job", "tres_per_task", "tres_per_socket" }

function kiwi_job(job)
  if not kiwi.shares(settings, job.partition) then return end
  local asked = kiwi.names_gpu(job.tres_per_node)
  for _, field in ipairs(WHOLE_JOB) do
    if kiwi.names_gpu(job[field]) then
      asked = true
      job[field] = ""
    end
  end
  if asked then
    job.tres_per_node = kiwi.with_part(job.tres_per_node, "gres:" .. settings.gres)
    slurm.log_user("GPUs are shared here (Kiwi): the job gets %s instead of a whole GPU.", settings.gres)
  elseif not (job.tres_per_node or ""):find(settings.gres:match("^[^:]+"), 1, true) then
    return
  end
  -- nil with --mem-per-cpu, 0 with --mem=0 (all of the node).
  local given, need = job.min_mem_per_node, kiwi.ram_mb(settings)
  if job.min_mem_per_cpu or given == 0 or (given and given >= need) then return end
  job.min_mem_per_node = need
  slurm.log_user("The job gets %d MB of RAM, so that its GPU memory can be moved there.", need)
end

function slurm_job_submit(job, partitions, uid)
  kiwi_job(job)
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
