"""Where models and data sets come from: folders, the Hugging Face Hub, GGUF files, installed packages.

`fetch.fetch_sources` turns what a config names into folders and files on this machine. The launcher and the commands
call it once, before they plan, so that the processes of a run only ever see folders. To add a kind of source, add its
case to `fetch.model_folder` or `fetch.data_files`.
"""
