-- Slurm's cli_filter plugin (CliFilterPlugins=lua), in srun, salloc and sbatch. It does what job_submit.lua does, before
-- the command asks: srun asks for the GPUs of its step with the same options, and a step gets nothing that its job lacks.
-- A site with a script of its own calls kiwi_options from it.
local directory = "/etc/slurm/"
local kiwi = dofile(directory .. "kiwi_slurm.lua")
local settings = dofile(directory .. "kiwi_settings.lua")

local GPUS = { "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket" }

function kiwi_options(options)
  if not kiwi.shares(settings, options["partition"]) then return end
  local asked = kiwi.names_gpu(options["gres"])
  for _, name in ipairs(GPUS) do
    if (options[name] or "") ~= "" then
      asked = true
      options[name] = "" -- Slurm 22.05 cannot unset an option, and takes "" for none
    end
  end
  if asked then options["gres"] = kiwi.with_part(options["gres"], settings.gres) end
end

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  kiwi_options(options)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
  return slurm.SUCCESS
end

return slurm.SUCCESS
